"""Asynchronous collectives on embeddings, with gradients and codecs: each starts a collective and returns an awaitable.

The result of ``wait()`` takes part in autograd; the backward runs the inverse collective (all-to-all the other way,
all-gather for reduce-scatter) and divides by the number of ranks unless ``set_gradient_division`` says otherwise. A
group of one rank needs no collective: the result is the input itself.

Shapes: ``W`` ranks, ``B`` examples of this rank, ``B_global`` of all ranks, ``D`` columns of this rank's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.comm.autograd import Request, Start, Wait
from recinfer.distributed.comm.shapes import (
    All2AllPooledInfo,
    All2AllSequenceInfo,
    All2AllVInfo,
    AllGatherBaseInfo,
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterVInfo,
    VariableBatchAll2AllPooledInfo,
)
from recinfer.distributed.types import Awaitable, NoWait, QuantizedCommCodecs
from recinfer.errors import InputError

__all__ = [
    "all_gather_base_pooled",
    "alltoall_pooled",
    "alltoall_sequence",
    "alltoallv",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_per_feature_pooled",
    "reduce_scatter_v_pooled",
    "variable_batch_alltoall_pooled",
]


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    return group


def _start(group: dist.ProcessGroup, info: Any, inputs: Sequence[Tensor]) -> Request:
    myreq: Request = Request(group, inputs[0].device)
    myreq.wait_function = Wait
    myreq.dummy_tensor = Start.apply(group, myreq, info, *inputs)
    return myreq


def _check(fits: bool, message: str) -> None:
    if not fits:
        raise InputError(message)


def alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank: list[int],
    dim_sum_per_rank: list[int],
    dim_sum_per_rank_tensor: Tensor | None = None,
    cumsum_dim_sum_per_rank_tensor: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Give every rank the pooled embeddings of its examples from all ranks' tables.

    Args:
        a2a_pooled_embs_tensor: ``[B_global, D]``, rows of rank 0's examples first.
        batch_size_per_rank: examples of each rank.
        dim_sum_per_rank: columns that each rank's tables have together.
        dim_sum_per_rank_tensor, cumsum_dim_sum_per_rank_tensor: do nothing (:mod:`recinfer.ignored`).
        group: the process group; the default one if None.
        codecs: compress the data that is sent, in the forward and the backward.

    Returns:
        awaitable of ``[B, sum of dim_sum_per_rank]``, columns of rank 0's tables first.

    Raises:
        InputError: the tensor is not ``[sum of batch_size_per_rank, dim_sum_per_rank of this rank]``.
    """
    group = _group(group)
    if group.size() == 1:
        return NoWait(a2a_pooled_embs_tensor)
    expected = (sum(batch_size_per_rank), dim_sum_per_rank[group.rank()])
    _check(
        tuple(a2a_pooled_embs_tensor.shape) == expected,
        f"alltoall_pooled: got {tuple(a2a_pooled_embs_tensor.shape)} on rank {group.rank()}; expected {expected} "
        f"from batch_size_per_rank {batch_size_per_rank} and dim_sum_per_rank {dim_sum_per_rank}",
    )
    info = All2AllPooledInfo(
        batch_size_per_rank, dim_sum_per_rank, dim_sum_per_rank_tensor, cumsum_dim_sum_per_rank_tensor, codecs
    )
    return _start(group, info, [a2a_pooled_embs_tensor])


def variable_batch_alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    batch_size_per_feature_pre_a2a: list[int],
    emb_dim_per_rank_per_feature: list[list[int]],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """:func:`alltoall_pooled` with a separate batch size for every feature and rank.

    Args:
        a2a_pooled_embs_tensor: 1-D: of each rank, of each feature here, of each row its columns.
        batch_size_per_rank_per_feature: ``[ranks][features here]``: rows that each rank has in this rank's features.
        batch_size_per_feature_pre_a2a: rows that this rank has in every feature, features of rank 0 first.
        emb_dim_per_rank_per_feature: ``[ranks][features there]``: columns.
        group, codecs: as in :func:`alltoall_pooled`.

    Returns:
        awaitable of 1-D: of each feature (of rank 0 first), of each of this rank's rows its columns.

    Raises:
        InputError: the size of the tensor does not fit the batch sizes and columns.
    """
    group = _group(group)
    if group.size() == 1:
        return NoWait(a2a_pooled_embs_tensor)
    info = VariableBatchAll2AllPooledInfo(
        batch_size_per_rank_per_feature, batch_size_per_feature_pre_a2a, emb_dim_per_rank_per_feature, codecs
    )
    dims = emb_dim_per_rank_per_feature[group.rank()]
    expected = sum(rows * dim for batches in batch_size_per_rank_per_feature for rows, dim in zip(batches, dims))
    _check(
        a2a_pooled_embs_tensor.numel() == expected,
        f"variable_batch_alltoall_pooled: got {a2a_pooled_embs_tensor.numel()} numbers on rank {group.rank()}; "
        f"expected {expected} from batch sizes {batch_size_per_rank_per_feature} and dims {dims}",
    )
    return _start(group, info, [a2a_pooled_embs_tensor])


def alltoall_sequence(
    a2a_sequence_embs_tensor: Tensor,
    forward_recat_tensor: Tensor | None,
    backward_recat_tensor: Tensor | None,
    lengths_after_sparse_data_all2all: Tensor,
    input_splits: list[int],
    output_splits: list[int],
    variable_batch_size: bool = False,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Send the row of every id back to the rank that sent the id.

    Args:
        a2a_sequence_embs_tensor: ``[N, D]``, a row per id of (feature, rank, example).
        forward_recat_tensor: order of the (feature, rank) pieces by which they are (rank, feature); None if they are.
        backward_recat_tensor: the inverse order.
        lengths_after_sparse_data_all2all: ids of each (feature, rank, example).
        input_splits: ids that this rank sent to each rank, which is the number of rows that it receives.
        output_splits: ids that it received from each rank, which is the number of rows that it sends.
        variable_batch_size: ranks have different batch sizes; recat counts single lengths then.
        group, codecs: as in :func:`alltoall_pooled`.

    Returns:
        awaitable of ``[sum of input_splits, D]``, in the order in which the ids were sent.

    Raises:
        InputError: ``N`` is not the sum of ``output_splits``.
    """
    group = _group(group)
    if group.size() == 1:
        return NoWait(a2a_sequence_embs_tensor)
    _check(
        a2a_sequence_embs_tensor.dim() == 2 and a2a_sequence_embs_tensor.shape[0] == sum(output_splits),
        f"alltoall_sequence: got {tuple(a2a_sequence_embs_tensor.shape)}; expected {sum(output_splits)} rows from "
        f"output_splits {output_splits}",
    )
    info = All2AllSequenceInfo(
        embedding_dim=a2a_sequence_embs_tensor.shape[1],
        lengths_after_sparse_data_all2all=lengths_after_sparse_data_all2all,
        forward_recat_tensor=forward_recat_tensor,
        backward_recat_tensor=backward_recat_tensor,
        input_splits=input_splits,
        output_splits=output_splits,
        variable_batch_size=variable_batch_size,
        codecs=codecs,
    )
    return _start(group, info, [a2a_sequence_embs_tensor])


def alltoallv(
    inputs: list[Tensor],
    out_split: list[int] | None = None,
    per_rank_split_lengths: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[list[Tensor]]:
    """:func:`alltoall_pooled` for a list of tables' embeddings; examples are divided over the ranks as evenly as
    possible.

    Args:
        inputs: a tensor ``[B_global, D_t]`` for each table of this rank.
        out_split: columns that each rank's tables have together.
        per_rank_split_lengths: tables of each rank, instead of ``out_split``; all tables then have the same number of
            columns.
        group, codecs: as in :func:`alltoall_pooled`.

    Returns:
        awaitable of one ``[B, columns of rank r]`` a rank.

    Raises:
        InputError: neither ``out_split`` nor ``per_rank_split_lengths``, or an empty list.
    """
    group = _group(group)
    _check(len(inputs) > 0, "alltoallv: got an empty list; every rank needs at least one tensor [B_global, D]")
    dims = [table.shape[1] for table in inputs]
    if out_split is None:
        if per_rank_split_lengths is None:
            raise InputError("alltoallv: neither out_split nor per_rank_split_lengths is given; pass one of them")
        out_split = [tables * dims[0] for tables in per_rank_split_lengths]
    if group.size() == 1:
        return NoWait([torch.cat(inputs, dim=1)])
    total = inputs[0].shape[0]
    base, more = divmod(total, group.size())
    batches = [base + (rank < more) for rank in range(group.size())]
    info = All2AllVInfo(out_split, total, batches[group.rank()], batches, dims, codecs=codecs)
    request: Awaitable[Any] = _start(group, info, inputs)
    request.callbacks.append(list)
    return request


def reduce_scatter_pooled(
    inputs: list[Tensor], group: dist.ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Sum the tensors that all ranks hold for this rank.

    Args:
        inputs: a tensor for each rank, of the shape that this rank expects.
        group, codecs: as in :func:`alltoall_pooled`.

    Returns:
        awaitable of the sum over ranks of ``inputs[this rank]``.

    Raises:
        InputError: the number of tensors is not the number of ranks.
    """
    group = _group(group)
    _check(
        len(inputs) == group.size(),
        f"reduce_scatter_pooled: got {len(inputs)} tensors; expected one for each of {group.size()} ranks",
    )
    if group.size() == 1:
        return NoWait(inputs[0])
    info = ReduceScatterInfo([tensor.shape for tensor in inputs], codecs)
    return _start(group, info, inputs)


def reduce_scatter_base_pooled(
    input: Tensor, group: dist.ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """:func:`reduce_scatter_pooled` of one tensor ``[W * B, ...]``, cut evenly; awaitable of ``[B, ...]``.

    Raises:
        InputError: the rows do not divide by the number of ranks.
    """
    group = _group(group)
    if group.size() == 1:
        return NoWait(input)
    _check(
        input.shape[0] % group.size() == 0,
        f"reduce_scatter_base_pooled: {input.shape[0]} rows do not divide by {group.size()} ranks; "
        "use reduce_scatter_v_pooled",
    )
    info = ReduceScatterBaseInfo(input.shape, codecs)
    return _start(group, info, [input])


def reduce_scatter_v_pooled(
    input: Tensor,
    input_splits: list[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """:func:`reduce_scatter_pooled` of one tensor ``[sum of input_splits, ...]``, ``input_splits[r]`` rows for rank r.

    Raises:
        InputError: the number of splits is not the number of ranks, or their sum is not the number of rows.
    """
    group = _group(group)
    _check(
        len(input_splits) == group.size() and sum(input_splits) == input.shape[0],
        f"reduce_scatter_v_pooled: input_splits {input_splits} with {input.shape[0]} rows and {group.size()} ranks; "
        "expected one number of rows for each rank",
    )
    if group.size() == 1:
        return NoWait(input)
    info = ReduceScatterVInfo(
        input_sizes=[torch.Size([rows, *input.shape[1:]]) for rows in input_splits],
        input_splits=input_splits,
        equal_splits=len(set(input_splits)) == 1,
        total_input_size=list(input.shape),
        codecs=codecs,
    )
    return _start(group, info, [input])


def reduce_scatter_v_per_feature_pooled(
    input: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    embedding_dims: list[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """:func:`reduce_scatter_v_pooled` with a separate batch size for every feature and rank.

    Args:
        input: 1-D: of each rank, of each feature, of each row its columns.
        batch_size_per_rank_per_feature: ``[ranks][features]``: rows.
        embedding_dims: columns of each feature.
        group, codecs: as in :func:`alltoall_pooled`.

    Returns:
        awaitable of 1-D: of each feature, of each of this rank's rows its columns.
    """
    numbers = [
        sum(rows * dim for rows, dim in zip(batches, embedding_dims)) for batches in batch_size_per_rank_per_feature
    ]
    return reduce_scatter_v_pooled(input, numbers, group, codecs)


def all_gather_base_pooled(
    input: Tensor, group: dist.ProcessGroup | None = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Concatenate the ``[B, ...]`` of every rank, which all have the same size: awaitable of ``[W * B, ...]``."""
    group = _group(group)
    if group.size() == 1:
        return NoWait(input)
    return _start(group, AllGatherBaseInfo(input.shape, codecs), [input])
