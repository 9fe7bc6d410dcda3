"""The steps of sharded quantized tables in one process: ids to the devices, lookups, vectors back.

Ids are split and vectors combined as in training, with copies between devices instead of collectives, and lookups of
packed rows instead of training kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.exchange.devices import EmbeddingsAllToOne, sent_to
from recinfer.distributed.exchange.features import ShardFeaturesDist
from recinfer.distributed.exchange.pooled import PooledContext, ShardPooledDist
from recinfer.distributed.exchange.sequence import SequenceShardingContext, ShardSequenceDist
from recinfer.distributed.quant.place import memory_of
from recinfer.distributed.tables.rank_lookup import RankLookup, embeddings_cat_empty_rank_handle
from recinfer.distributed.tables.slots import ShardLayout
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.shardings import BaseEmbeddingDist, BaseSparseFeaturesDist, EmbeddingShardingContext
from recinfer.distributed.types.tables import GroupedEmbeddingConfig
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.buffers import Buffers, Placed
from recinfer.quant.kernels import table_batch
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "FeaturesToDevices",
    "GroupLookup",
    "PackedLookup",
    "PooledFromDevices",
    "RowsFromDevices",
    "tables_of",
]


# ---------------------------------------------------------------- lookups


def tables_of(groups: Sequence[GroupedEmbeddingConfig]) -> list[Placed]:
    """The local shards of groups, in order, without a position in memory or in their tables."""
    return [
        Placed(Rect(0, 0, t.local_rows, 0, t.local_cols, t.name), t.data_type, memory=memory_of(t.compute_kernel))
        for group in groups
        for t in group.embedding_tables
    ]


class GroupLookup:
    """The op call of one grouped config."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tables: Sequence[Placed],
        buffers: Buffers,
        *,
        pooled: bool,
        is_weighted: bool,
        output_dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.is_weighted = is_weighted
        reads = [placed for placed, t in zip(tables, config.embedding_tables) for _ in t.feature_names]
        self.batch = table_batch(
            reads, config.pooling if pooled else PoolingType.NONE, buffers, output_dtype=output_dtype
        )

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """``[B, columns of all features]``, or ``[ids, columns]``."""
        ids, offsets = features.values(), features.offsets()
        if self.batch.pooling is PoolingType.NONE:
            rows = self.batch.rows_per_read(ids, offsets, features.offset_per_key())
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        weights = features.weights_or_none() if self.is_weighted else None
        return self.batch.without_padding(self.batch(ids, offsets, weights))


class PackedLookup(RankLookup[GroupLookup]):
    """The op calls of a rank's packed tables, a call per grouped config.

    Args:
        groups: the groups; features come in their order.
        tables: the groups' rectangles, in the same order.
        buffers: hold their rows.
        pooled: bags or one row per id.
        is_weighted: ids carry weights, even if the groups are not weighted.
        output_dtype: output dtype of a group.
    """

    def __init__(
        self,
        groups: Sequence[GroupedEmbeddingConfig],
        tables: Sequence[Placed],
        buffers: Buffers,
        *,
        pooled: bool,
        is_weighted: bool = False,
        output_dtype: Callable[[GroupedEmbeddingConfig], torch.dtype] = lambda group: torch.float32,
    ) -> None:
        self.tables = list(tables)
        self.buffers = buffers
        kernels, rest = [], iter(self.tables)
        for group in groups:
            mine = list(islice(rest, len(group.embedding_tables)))
            weighted, dtype = group.is_weighted or is_weighted, output_dtype(group)
            kernels.append(GroupLookup(group, mine, buffers, pooled=pooled, is_weighted=weighted, output_dtype=dtype))
        super().__init__(groups, kernels)

    def pooled(self, features: KeyedJaggedTensor) -> Tensor:
        """``[B, columns of all groups]``; ids are in range."""
        nothing = torch.empty(features.stride(), 0, device=self.buffers.device)
        return embeddings_cat_empty_rank_handle(self(features), nothing, dim=1)


# ---------------------------------------------------------------- ids and vectors


class FeaturesToDevices(BaseSparseFeaturesDist[KJTList]):
    """Sends every device the ids of its rectangles, rebased to their rows; ids are split on the input's device.

    Args:
        layout: the slots.
        devices: device of each rank.
        want_permute: unpooled rows will be put back into the order of the ids.
    """

    def __init__(self, layout: ShardLayout, devices: Sequence[torch.device | None], want_permute: bool = False) -> None:
        super().__init__()
        self._expand = ShardFeaturesDist(layout, None, want_permute)
        self._splits = layout.slots_per_rank
        self._devices = list(devices)

    def forward(
        self, sparse_features: KeyedJaggedTensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> KJTList:
        """The features of every device; sent ids are recorded in ``sharding_ctx``."""
        return sent_to(self._expand(sparse_features, sharding_ctx).wait().wait(), self._splits, self._devices)


class PooledFromDevices(BaseEmbeddingDist[PooledContext, list[Tensor], Tensor]):
    """Copies the devices' sums to one of them and combines column and row pieces."""

    def __init__(self, layout: ShardLayout, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._bring = EmbeddingsAllToOne(device, layout.world_size, cat_dim=1)
        self._combine = ShardPooledDist(layout, None, device)

    @torch.no_grad()
    def forward(self, local_embs: list[Tensor], sharding_ctx: PooledContext | None = None) -> Tensor:
        """``[B, sum of dims]`` in module order."""
        ctx = sharding_ctx if sharding_ctx is not None else PooledContext()
        ctx = replace(ctx, divisors=[divisor.to(self._device) for divisor in ctx.divisors])
        return self._combine(self._bring(local_embs), ctx).wait().detach()


class RowsFromDevices(BaseEmbeddingDist[SequenceShardingContext, list[Tensor], list[Tensor]]):
    """Copies the devices' rows to one of them, in the order of their ids."""

    def __init__(self, layout: ShardLayout, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._bring = EmbeddingsAllToOne(device, layout.world_size, cat_dim=0)
        self._order = ShardSequenceDist(layout, None, 0)

    @torch.no_grad()
    def forward(self, local_embs: list[Tensor], sharding_ctx: SequenceShardingContext | None = None) -> list[Tensor]:
        """A tensor ``[ids, columns]`` for each column piece of each output, in module order.

        Args:
            local_embs: the rows of each device, slot by slot, in one dimension.
            sharding_ctx: data of the input step.
        """
        assert sharding_ctx is not None, "the output step needs the context of the input step"
        permute = sharding_ctx.sent_ids.permute
        sent = replace(sharding_ctx.sent_ids, permute=None if permute is None else permute.to(self._device))
        found: Any = self._order(self._bring(local_embs), replace(sharding_ctx, sent_ids=sent)).wait()
        return [rows.detach() for rows in found]
