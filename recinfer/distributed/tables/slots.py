"""ShardLayout: the rectangles of a module's tables by rank, and the orders and permutations of features and outputs.

A shard is a rectangle (rows x columns) of a table on a rank. A *slot* is one feature read from one rectangle. Slots are
in the order in which they are sent: by rank, then kernel group, then table. A *bucket* is the part of a feature's ids
in one row range of its table. All orders are computed once, here.

Shape suffixes used in this package: F features, S slots, B batch, W ranks, N ids, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from recinfer.distributed.tables.grouping import group_tables
from recinfer.distributed.types import ShardingType
from recinfer.distributed.types.edges import rects_of
from recinfer.distributed.types.kernels import EmbeddingComputeKernel
from recinfer.distributed.types.shardings import EmbeddingShardingInfo
from recinfer.distributed.types.tables import GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect, Strip, tile
from recinfer.modules.embedding_configs import PoolingType, data_type_to_dtype

__all__ = ["ShardLayout", "Slot", "Tiling", "check_kind", "later", "tiling_of"]


def later(weight: torch.Tensor) -> None:
    """The ``init_fn`` of kernels, without effect: :mod:`recinfer.distributed.tables.values` sets the values
    afterwards."""


@dataclass(frozen=True)
class Tiling:
    """The rectangles of one table.

    Attributes:
        rects: the table's rectangles in the plan's order, without empty ones.
        strips: the table's strips from left to right.
        shards: torch's shard metadata of the rectangles; empty for a replica.
        metadata: metadata of a ShardedTensor of the table; None for a replica.
    """

    rects: list[Rect]
    strips: tuple[Strip, ...]
    shards: dict[Rect, ShardMetadata]
    metadata: ShardedTensorMetadata | None

    @property
    def cuts_rows(self) -> bool:
        """Whether a rectangle has only a part of the rows."""
        return any(len(strip.rects) > 1 for strip in self.strips)


@dataclass(frozen=True)
class Slot:
    """A feature and one rectangle that it reads."""

    rect: Rect
    feature: str
    name: str  # name of the output: feature, or feature@table


def tiling_of(info: EmbeddingShardingInfo, world_size: int) -> Tiling:
    """The tiling of a table that is not replicated.

    Raises:
        ConfigError: the plan has no shards, names a rank outside the world, or its shards do not tile the table.
    """
    config = info.embedding_config
    rows, cols = config.num_embeddings, config.embedding_dim
    given = rects_of(config.name, rows, cols, info.param_sharding, world_size)
    shards = getattr(info.param_sharding.sharding_spec, "shards", [])
    # Shards without columns are empty too, so they are omitted like those without rows.
    held = [(rect, shard) for rect, shard in zip(given, shards) if rect.rows and rect.cols]
    rects = [rect for rect, _ in held]
    strips = tile(config.name, rows, cols, rects, world_size=world_size)
    metadata = ShardedTensorMetadata(
        shards_metadata=[shard for _, shard in held],
        size=torch.Size([rows, cols]),
        tensor_properties=TensorProperties(
            dtype=data_type_to_dtype(config.data_type),
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=False,
        ),
    )
    return Tiling(rects, strips, dict(held), metadata)


def _replica(info: EmbeddingShardingInfo) -> Tiling:
    config = info.embedding_config
    rect = Rect(0, 0, config.num_embeddings, 0, config.embedding_dim, config.name)
    return Tiling([rect], (Strip(0, config.embedding_dim, (rect,)),), {}, None)


class ShardLayout:
    """All rectangles of a set of tables, and the orders that follow from them.

    Args:
        infos: the tables, in module order; data_parallel ones if and only if ``replicated``.
        world_size: ranks.
        is_weighted: ids carry weights.
        pooled: bags or one row per id.
        replicated: every rank holds all tables; the layout is that of a world of one.

    Attributes:
        groups_per_rank: the kernel groups of each rank.
        tilings: the tiling of each table, by name, in module order.
        rects_per_rank: the rectangles of each rank, in the order of its groups.
        slots: all ranks' slots, rank after rank.
        slots_per_rank: number of slots on each rank.
        features: the distinct features.
        outputs: (output name, columns, feature) of each output block, in module order.
        sums: for each output block its column pieces from left to right, for each the slots whose rows add up (pooled)
            or hold some of the ids (unpooled), from the first rows to the last.
        cuts: (feature, row edges) of each feature that is cut into buckets.
        slot_cuts: for each slot (index in ``cuts``, bucket); None for a slot with all rows.
        mean: the outputs whose sum is divided by the bag's length after the exchange.
    """

    def __init__(
        self,
        infos: Sequence[EmbeddingShardingInfo],
        world_size: int,
        *,
        is_weighted: bool,
        pooled: bool,
        replicated: bool = False,
    ) -> None:
        self.infos = list(infos)
        self.world_size = 1 if replicated else world_size
        self.tilings = {
            info.embedding_config.name: _replica(info) if replicated else tiling_of(info, world_size)
            for info in self.infos
        }
        self.is_weighted = is_weighted
        self.pooled = pooled
        by_id: dict[int, Rect] = {}
        per_rank: list[list[ShardedEmbeddingTable]] = [[] for _ in range(self.world_size)]
        for info, tiling in zip(self.infos, self.tilings.values()):
            for rect in tiling.rects:
                table = self._table(info, rect, tiling)
                per_rank[rect.rank].append(table)
                by_id[id(table)] = rect
        self.groups_per_rank: list[list[GroupedEmbeddingConfig]] = group_tables(per_rank)
        self.rects_per_rank = [
            [by_id[id(table)] for group in groups for table in group.embedding_tables]
            for groups in self.groups_per_rank
        ]
        self.slots: list[Slot] = []
        self.slots_per_rank: list[int] = []
        for groups in self.groups_per_rank:
            before = len(self.slots)
            self.slots += [
                Slot(by_id[id(table)], feature, name)
                for group in groups
                for table in group.embedding_tables
                for feature, name in zip(table.feature_names, table.embedding_names)
            ]
            self.slots_per_rank.append(len(self.slots) - before)
        self.features = list(dict.fromkeys(f for info in self.infos for f in info.embedding_config.feature_names))
        self.cuts: list[tuple[str, tuple[int, ...]]] = []
        self.slot_cuts = self._cut_slots()
        self.outputs: list[tuple[str, int, str]] = []
        self.sums: list[list[list[int]]] = []
        self.mean: list[int] = []
        self._place_outputs()

    def _table(self, info: EmbeddingShardingInfo, rect: Rect, tiling: Tiling) -> ShardedEmbeddingTable:
        config = info.embedding_config
        pooling = getattr(config, "pooling", PoolingType.NONE) if self.pooled else PoolingType.NONE
        if self._divided_later(info):
            pooling = PoolingType.SUM
        return ShardedEmbeddingTable(
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            name=config.name,
            data_type=config.data_type,
            feature_names=list(config.feature_names),
            weight_init_max=config.get_weight_init_max(),
            weight_init_min=config.get_weight_init_min(),
            init_fn=later,
            need_pos=config.need_pos,
            pooling=pooling,
            is_weighted=self.is_weighted,
            has_feature_processor=False,
            embedding_names=info.names(),
            compute_kernel=EmbeddingComputeKernel(info.param_sharding.compute_kernel),
            local_rows=rect.rows,
            local_cols=rect.cols,
            local_metadata=tiling.shards.get(rect),
            global_metadata=tiling.metadata,
            fused_params=info.fused_params,
        )

    def _cut_slots(self) -> list[tuple[int, int] | None]:
        strips = {rect: strip for tiling in self.tilings.values() for strip in tiling.strips for rect in strip.rects}
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        result: list[tuple[int, int] | None] = []
        for slot in self.slots:
            strip = strips[slot.rect]
            if len(strip.rects) == 1:
                result.append(None)
            else:
                cut = known.setdefault((slot.feature, strip.edges), len(known))
                result.append((cut, strip.rects.index(slot.rect)))
        self.cuts = list(known)
        return result

    @property
    def num_buckets(self) -> int:
        """The largest number of row pieces of a strip; 0 when no rows are cut."""
        return max((len(edges) - 1 for _, edges in self.cuts), default=0)

    def _divided_later(self, info: EmbeddingShardingInfo) -> bool:
        """Whether sums of a MEAN table are divided by the bag's length after the exchange, not by the kernel.

        The rank of a row piece lacks a part of the bag, and the backward of FBGEMM's CPU kernel does not divide
        weighted bags.
        """
        config = info.embedding_config
        mean = self.pooled and getattr(config, "pooling", None) is PoolingType.MEAN
        return mean and (self.is_weighted or self.tilings[config.name].cuts_rows)

    def _place_outputs(self) -> None:
        spots = {(slot.rect, slot.feature): i for i, slot in enumerate(self.slots)}
        for info, tiling in zip(self.infos, self.tilings.values()):
            config = info.embedding_config
            for feature, name in zip(config.feature_names, info.names()):
                if self._divided_later(info):
                    self.mean.append(len(self.outputs))
                self.outputs.append((name, config.embedding_dim, feature))
                self.sums.append([[spots[rect, feature] for rect in strip.rects] for strip in tiling.strips])

    @property
    def widths(self) -> list[int]:
        """Columns of each slot."""
        return [slot.rect.cols for slot in self.slots]

    def widths_per_rank(self) -> list[list[int]]:
        """Columns of the slots of each rank."""
        widths, at, result = self.widths, 0, []
        for count in self.slots_per_rank:
            result.append(widths[at : at + count])
            at += count
        return result


def check_kind(infos: Sequence[EmbeddingShardingInfo], kind: ShardingType) -> None:
    """Raise for tables of another sharding type.

    Raises:
        ConfigError: naming the table.
    """
    for info in infos:
        got = info.param_sharding.sharding_type
        if got != kind.value:
            raise ConfigError(
                f"table {info.embedding_config.name!r} is planned as {got}; this sharding is {kind.value}"
            )
