"""Exchange of embeddings between the ranks of a process group: from the ranks with the tables to the ranks with the
examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recinfer.distributed.comm.collectives import (
    all_gather_base_pooled,
    alltoall_pooled,
    alltoall_sequence,
    reduce_scatter_base_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
    variable_batch_alltoall_pooled,
)
from recinfer.distributed.types import Awaitable, QuantizedCommCodecs
from recinfer.errors import InputError

__all__ = [
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsAwaitable",
    "PooledEmbeddingsReduceScatter",
    "SequenceEmbeddingsAllToAll",
    "SequenceEmbeddingsAwaitable",
    "VariableBatchPooledEmbeddingsAllToAll",
    "VariableBatchPooledEmbeddingsReduceScatter",
]

Callback = Callable[[Tensor], Tensor]


class PooledEmbeddingsAwaitable(Awaitable[Tensor]):
    """Awaitable of pooled embeddings.

    Args:
        tensor_awaitable: the collective.
    """

    def __init__(self, tensor_awaitable: Awaitable[Tensor]) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable

    def _wait_impl(self) -> Tensor:
        return self._tensor_awaitable.wait()

    @property
    def callbacks(self) -> list[Callback]:
        """Functions that are applied to the tensor, in order."""
        return self._callbacks


class _Exchange(nn.Module):
    """Base of the exchanges: a process group and codecs."""

    def __init__(self, pg: dist.ProcessGroup, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__()
        self._pg = pg
        self._codecs = codecs


class _PooledAllToAll(_Exchange):
    """Base of the two pooled all-to-alls."""

    def __init__(
        self, pg: dist.ProcessGroup, callbacks: list[Callback] | None, codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__(pg, codecs)
        self._callbacks = [] if callbacks is None else callbacks

    @property
    def callbacks(self) -> list[Callback]:
        """Functions that are applied to every output, in order."""
        return self._callbacks

    def _awaitable(self, started: Awaitable[Tensor]) -> PooledEmbeddingsAwaitable:
        result = PooledEmbeddingsAwaitable(started)
        result.callbacks.extend(self._callbacks)
        return result


class PooledEmbeddingsAllToAll(_PooledAllToAll):
    """``[examples of all ranks, columns here]`` to ``[examples here, columns of all ranks]``.

    Args:
        pg: the process group.
        dim_sum_per_rank: columns that each rank's tables have together.
        device: does nothing (:mod:`recinfer.ignored`): buffers are where the input is.
        callbacks: functions that are applied to every output.
        codecs: compress the data that is sent, in the forward and the backward.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        dim_sum_per_rank: list[int],
        device: torch.device | None = None,
        callbacks: list[Callback] | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, callbacks, codecs)
        self._dim_sum_per_rank = dim_sum_per_rank

    def forward(self, local_embs: Tensor, batch_size_per_rank: list[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Start the exchange.

        Args:
            local_embs: ``[examples of all ranks, dim_sum_per_rank of this rank]``, rank 0's examples first.
            batch_size_per_rank: examples of each rank; if None, all have the same number.

        Raises:
            InputError: sizes that do not fit together.
        """
        ranks = self._pg.size()
        if batch_size_per_rank is None:
            if local_embs.shape[0] % ranks:
                raise InputError(
                    f"PooledEmbeddingsAllToAll: {local_embs.shape[0]} rows do not divide by {ranks} ranks; pass "
                    "batch_size_per_rank"
                )
            batch_size_per_rank = [local_embs.shape[0] // ranks] * ranks
        return self._awaitable(
            alltoall_pooled(
                local_embs, batch_size_per_rank, self._dim_sum_per_rank, group=self._pg, codecs=self._codecs
            )
        )


class VariableBatchPooledEmbeddingsAllToAll(_PooledAllToAll):
    """:class:`PooledEmbeddingsAllToAll` with a separate batch size for every feature and rank.

    Args:
        emb_dim_per_rank_per_feature: ``[ranks][features there]``: columns.

    The other arguments are those of :class:`PooledEmbeddingsAllToAll`.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        emb_dim_per_rank_per_feature: list[list[int]],
        device: torch.device | None = None,
        callbacks: list[Callback] | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, callbacks, codecs)
        self._emb_dim_per_rank_per_feature = emb_dim_per_rank_per_feature

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: list[list[int]],
        batch_size_per_feature_pre_a2a: list[int],
    ) -> PooledEmbeddingsAwaitable:
        """Start the exchange; arguments and result as
        :func:`recinfer.distributed.comm_ops.variable_batch_alltoall_pooled`."""
        return self._awaitable(
            variable_batch_alltoall_pooled(
                local_embs,
                batch_size_per_rank_per_feature,
                batch_size_per_feature_pre_a2a,
                self._emb_dim_per_rank_per_feature,
                group=self._pg,
                codecs=self._codecs,
            )
        )


class PooledEmbeddingsReduceScatter(_Exchange):
    """``[examples of all ranks, D]`` of partial sums to the sums ``[examples here, D]``, for tables cut by rows.

    Args:
        pg: the process group.
        codecs: compress the data that is sent, in the forward and the backward.
    """

    def forward(self, local_embs: Tensor, input_splits: list[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Start the exchange.

        Args:
            local_embs: ``[examples of all ranks, D]``, rank 0's examples first.
            input_splits: examples of each rank; if None, all have the same number.
        """
        if input_splits is None:
            started = reduce_scatter_base_pooled(local_embs, self._pg, self._codecs)
        else:
            started = reduce_scatter_v_pooled(local_embs, input_splits, self._pg, self._codecs)
        return PooledEmbeddingsAwaitable(started)


class VariableBatchPooledEmbeddingsReduceScatter(_Exchange):
    """:class:`PooledEmbeddingsReduceScatter` with a separate batch size for every feature and rank."""

    def forward(
        self, local_embs: Tensor, batch_size_per_rank_per_feature: list[list[int]], embedding_dims: list[int]
    ) -> PooledEmbeddingsAwaitable:
        """Start the exchange; see :func:`recinfer.distributed.comm_ops.reduce_scatter_v_per_feature_pooled`."""
        return PooledEmbeddingsAwaitable(
            reduce_scatter_v_per_feature_pooled(
                local_embs, batch_size_per_rank_per_feature, embedding_dims, self._pg, self._codecs
            )
        )


class PooledEmbeddingsAllGather(_Exchange):
    """``[B, D]`` of every rank, the same ``B`` everywhere, to ``[ranks * B, D]``; its backward is a reduce-scatter.

    Args:
        pg: the process group.
        codecs: compress the data that is sent, in the forward and the backward.
    """

    def forward(self, local_emb: Tensor) -> PooledEmbeddingsAwaitable:
        """Start the exchange."""
        return PooledEmbeddingsAwaitable(all_gather_base_pooled(local_emb, self._pg, self._codecs))


class SequenceEmbeddingsAwaitable(Awaitable[Tensor]):
    """Awaitable of the rows of ids.

    Args:
        tensor_awaitable: the collective.
        unbucketize_permute_tensor: integers ``[N]``: position of each id after the ids were sorted into buckets of
            rows.
        embedding_dim: columns.
    """

    def __init__(
        self, tensor_awaitable: Awaitable[Tensor], unbucketize_permute_tensor: Tensor | None, embedding_dim: int
    ) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable
        self._unbucketize_permute_tensor = unbucketize_permute_tensor
        self._embedding_dim = embedding_dim

    def _wait_impl(self) -> Tensor:
        rows_ND = self._tensor_awaitable.wait().view(-1, self._embedding_dim)
        if self._unbucketize_permute_tensor is None:
            return rows_ND
        return rows_ND.index_select(0, self._unbucketize_permute_tensor)


class SequenceEmbeddingsAllToAll(nn.Module):
    """Sends the row of every id to the rank that sent the id; the counterpart of KJTAllToAll.

    Args:
        pg: the process group.
        features_per_rank: number of features of each rank's tables.
        device: device of the lengths; buffers are on the input's device.
        codecs: compress the data that is sent, in the forward and the backward.
    """

    _forward_recat: Tensor
    _backward_recat: Tensor

    def __init__(
        self,
        pg: dist.ProcessGroup,
        features_per_rank: list[int],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._codecs = codecs
        self._num_features = features_per_rank[pg.rank()]
        ranks, features = pg.size(), self._num_features
        # From (feature, rank) to (rank, feature) pieces and back.
        forward = torch.arange(ranks * features, dtype=torch.int32, device=device).view(features, ranks).t().reshape(-1)
        self.register_buffer("_forward_recat", forward, persistent=False)
        self.register_buffer("_backward_recat", forward.argsort().to(torch.int32), persistent=False)

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: list[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> SequenceEmbeddingsAwaitable:
        """Start the exchange.

        Args:
            local_embs: ``[N, D]``, a row per id of (feature, rank, example).
            lengths: ids of each (feature, rank, example), as received from KJTAllToAll.
            input_splits: ids that this rank sent to each rank.
            output_splits: ids that it received from each rank.
            unbucketize_permute_tensor: integers ``[ids sent]``: applied to the received rows.
            batch_size_per_rank: examples of each rank; if None, all have the same number.
            sparse_features_recat: the permutation of KJTAllToAll; needed with unequal batches.

        Raises:
            InputError: unequal batches and no ``sparse_features_recat``.
        """
        unequal = batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1
        recat: Tensor | None = self._forward_recat
        back: Tensor | None = self._backward_recat
        if self._num_features <= 1:
            recat = back = None  # the rows are by rank
        elif unequal:
            if sparse_features_recat is None:
                raise InputError(
                    f"SequenceEmbeddingsAllToAll: batch sizes {batch_size_per_rank} differ; pass "
                    "sparse_features_recat, the recat of the KJTAllToAll that sent the ids"
                )
            back = sparse_features_recat
            recat = torch.argsort(back).to(torch.int32)
        started = alltoall_sequence(
            local_embs,
            recat,
            back,
            lengths,
            input_splits,
            output_splits,
            variable_batch_size=unequal,
            group=self._pg,
            codecs=self._codecs,
        )
        return SequenceEmbeddingsAwaitable(started, unbucketize_permute_tensor, local_embs.shape[1])
