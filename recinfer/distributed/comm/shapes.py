"""Sizes by rank and codecs of each collective of comm_ops.

Fields with the name of a function's argument are that argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recinfer.distributed.types import QuantizedCommCodecs

__all__ = [
    "All2AllDenseInfo",
    "All2AllPooledInfo",
    "All2AllSequenceInfo",
    "All2AllVInfo",
    "AllGatherBaseInfo",
    "ReduceScatterBaseInfo",
    "ReduceScatterInfo",
    "ReduceScatterVInfo",
    "VariableBatchAll2AllPooledInfo",
]


@dataclass
class All2AllPooledInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.alltoall_pooled`."""

    batch_size_per_rank: list[int]
    dim_sum_per_rank: list[int]
    dim_sum_per_rank_tensor: Tensor | None = None
    cumsum_dim_sum_per_rank_tensor: Tensor | None = None
    codecs: QuantizedCommCodecs | None = None


@dataclass
class VariableBatchAll2AllPooledInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.variable_batch_alltoall_pooled`.

    Args:
        input_splits, output_splits: elements to and from each rank; computed when None.
    """

    batch_size_per_rank_per_feature: list[list[int]]
    batch_size_per_feature_pre_a2a: list[int]
    emb_dim_per_rank_per_feature: list[list[int]]
    codecs: QuantizedCommCodecs | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None


@dataclass
class All2AllSequenceInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.alltoall_sequence`.

    Args:
        embedding_dim: columns.
        permuted_lengths_after_sparse_data_all2all: the lengths in the order of ``forward_recat_tensor``; filled in by
            the forward.
    """

    embedding_dim: int
    lengths_after_sparse_data_all2all: Tensor
    forward_recat_tensor: Tensor | None
    backward_recat_tensor: Tensor | None
    input_splits: list[int]
    output_splits: list[int]
    variable_batch_size: bool = False
    codecs: QuantizedCommCodecs | None = None
    permuted_lengths_after_sparse_data_all2all: Tensor | None = None


@dataclass
class All2AllVInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.alltoallv`.

    Args:
        dims_sum_per_rank: columns that each rank's tables have together.
        B_global: examples of all ranks.
        B_local: examples of this rank.
        B_local_list: examples of each rank.
        D_local_list: columns of each table here.
        input_split_sizes, output_split_sizes: elements to and from each rank; filled in by the forward.
        codecs: compress the data that is sent.
    """

    dims_sum_per_rank: list[int]
    B_global: int
    B_local: int
    B_local_list: list[int]
    D_local_list: list[int]
    input_split_sizes: list[int] = field(default_factory=list)
    output_split_sizes: list[int] = field(default_factory=list)
    codecs: QuantizedCommCodecs | None = None

    @property
    def dim_sum_per_rank(self) -> list[int]:
        """``dims_sum_per_rank``, under the name that the other infos use."""
        return self.dims_sum_per_rank


@dataclass
class All2AllDenseInfo:
    """Sizes of an all-to-all of dense tensors.

    Args:
        output_splits: rows from each rank.
        batch_size: rows of the input.
        input_shape: shape of the input.
        input_splits: rows to each rank.
    """

    output_splits: list[int]
    batch_size: int
    input_shape: list[int]
    input_splits: list[int]


@dataclass
class ReduceScatterInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.reduce_scatter_pooled`: the shape of the tensor for each rank."""

    input_sizes: list[torch.Size]
    codecs: QuantizedCommCodecs | None = None


@dataclass
class ReduceScatterBaseInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.reduce_scatter_base_pooled`: the shape of the whole input."""

    input_sizes: torch.Size
    codecs: QuantizedCommCodecs | None = None


@dataclass
class AllGatherBaseInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.all_gather_base_pooled`: the shape of the input."""

    input_size: torch.Size
    codecs: QuantizedCommCodecs | None = None


@dataclass
class ReduceScatterVInfo:
    """Sizes of :func:`recinfer.distributed.comm_ops.reduce_scatter_v_pooled`.

    Args:
        input_sizes: shape of the part for each rank.
        equal_splits: whether all ranks have equal numbers of rows.
        total_input_size: shape of the whole input.
    """

    input_sizes: list[torch.Size]
    input_splits: list[int]
    equal_splits: bool
    total_input_size: list[int]
    codecs: QuantizedCommCodecs | None
