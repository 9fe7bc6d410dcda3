"""Where the rectangles of a module's tables lie, and every order and permutation that follows from it.

A shard is a rectangle (rows x columns) of a table on a rank. A *slot* is one feature read from one rectangle. Slots
stand in the order in which they cross the wire: rank after rank, in a rank kernel group after kernel group, in a group
table after table. A *bucket* is a feature cut at the row edges of its table. All of it is computed once, here.

Shape suffixes used in this package: F features, S slots, B batch, W ranks, N ids, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from recinfer.distributed.embedding_sharding import EmbeddingShardingInfo, group_tables
from recinfer.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from recinfer.distributed.types import ShardingType
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import PoolingType, data_type_to_dtype

__all__ = ["Piece", "ShardLayout", "Slot", "check_kind", "global_metadata", "later", "pieces_of"]


def later(weight: torch.Tensor) -> None:
    """The ``init_fn`` that kernels are given: values come afterwards, from :mod:`recinfer.distributed.sharding.values`."""


@dataclass(frozen=True)
class Piece:
    """Rows ``row_start:row_stop``, columns ``col_start:col_stop`` of table number ``table``, on ``rank``."""

    table: int
    rank: int
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    metadata: ShardMetadata | None = None  # None: a replica, which is no shard

    @property
    def rows(self) -> int:
        """Height."""
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        """Width."""
        return self.col_stop - self.col_start


@dataclass(frozen=True)
class Slot:
    """One feature read from one rectangle."""

    piece: Piece
    feature: str
    name: str  # of the output: feature, or feature@table


def pieces_of(table: int, info: EmbeddingShardingInfo, world_size: int) -> list[Piece]:
    """The rectangles of a table, empty ones left out, in the plan's order.

    Raises:
        ConfigError: the plan has no shards, names a rank outside the world, or its shards do not tile the table.
    """
    config, sharding = info.embedding_config, info.param_sharding
    shards = getattr(sharding.sharding_spec, "shards", None)
    if not shards:
        raise ConfigError(
            f"table {config.name!r}: a {sharding.sharding_type} plan needs a sharding_spec that lists its shards"
        )
    pieces = []
    for i, shard in enumerate(shards):
        rank = _rank_of(shard, i, sharding.ranks)
        if not 0 <= rank < world_size:
            raise ConfigError(f"table {config.name!r}: shard {i} is on rank {rank}; the world has {world_size} ranks")
        (row, col), (rows, cols) = shard.shard_offsets, shard.shard_sizes
        if rows and cols:
            pieces.append(Piece(table, rank, row, row + rows, col, col + cols, shard))
    _check_tiling(config.name, config.num_embeddings, config.embedding_dim, pieces)
    return pieces


def _whole(table: int, info: EmbeddingShardingInfo) -> Piece:
    config = info.embedding_config
    return Piece(table, 0, 0, config.num_embeddings, 0, config.embedding_dim)


def _rank_of(shard: ShardMetadata, index: int, ranks: Sequence[int] | None) -> int:
    rank = shard.placement.rank() if shard.placement is not None else None
    if rank is not None:
        return rank
    assert ranks is not None
    return ranks[index]


def _check_tiling(name: str, rows: int, cols: int, pieces: list[Piece]) -> None:
    """Column pieces side by side, each cut into rows from top to bottom: what every sharding type makes."""
    columns: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        columns.setdefault((piece.col_start, piece.col_stop), []).append(piece)
    wrong, col = "", 0
    for start, stop in sorted(columns):
        row = 0
        for piece in sorted(columns[start, stop], key=lambda p: p.row_start):
            if (piece.row_start, start) != (row, col):
                wrong = f"shard {_rect(piece)} begins at row {piece.row_start}, column {start}; expected {row}, {col}"
                break
            row = piece.row_stop
        if not wrong and (row != rows or stop > cols):
            wrong = (
                f"shard {_rect(piece)} ends at row {row}, column {stop}; expected row {rows}, no column after {cols}"
            )
        if wrong:
            break
        col = stop
    if not wrong and col != cols:
        wrong = f"no shard holds columns {col} to {cols}"
    if wrong:
        got = "; ".join(_rect(piece) for piece in pieces)
        raise ConfigError(f"table {name!r}: {wrong}. The shards {got} do not tile its {rows} x {cols}")


def _rect(piece: Piece) -> str:
    return f"[{piece.row_start}:{piece.row_stop}, {piece.col_start}:{piece.col_stop}]@{piece.rank}"


def global_metadata(info: EmbeddingShardingInfo, pieces: Sequence[Piece]) -> ShardedTensorMetadata:
    """What a ShardedTensor of the table says of all its shards."""
    config = info.embedding_config
    return ShardedTensorMetadata(
        shards_metadata=[p.metadata for p in pieces if p.metadata is not None],
        size=torch.Size([config.num_embeddings, config.embedding_dim]),
        tensor_properties=TensorProperties(
            dtype=data_type_to_dtype(config.data_type),
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=False,
        ),
    )


class ShardLayout:
    """All rectangles of a set of tables, and the orders that follow.

    Args:
        infos: the tables, in module order; data_parallel ones if and only if ``replicated``.
        world_size: ranks.
        is_weighted: ids carry weights.
        pooled: bags or one row an id.
        replicated: every rank holds all tables; the layout is that of a world of one.

    Attributes:
        groups_per_rank: what each rank looks up, kernel group by kernel group.
        pieces_per_rank: the rectangles of each rank, in the order of its groups.
        slots: all ranks' slots, rank after rank.
        slots_per_rank: how many are on each rank.
        features: the distinct features that are read.
        outputs: (output name, columns, feature) of each output block, in module order.
        sums: for each output block its column pieces from left to right, for each the slots whose rows add up (pooled)
            or hold some of the ids (unpooled), from the first rows to the last.
        cuts: (feature, row edges) of each feature that is cut into buckets.
        slot_cuts: of each slot, (which of ``cuts``, which bucket); None for a slot of whole columns.
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
        if replicated:
            self.pieces = [[_whole(i, info)] for i, info in enumerate(self.infos)]
        else:
            self.pieces = [pieces_of(i, info, world_size) for i, info in enumerate(self.infos)]
        self.is_weighted = is_weighted
        self.pooled = pooled
        by_id: dict[int, Piece] = {}
        per_rank: list[list[ShardedEmbeddingTable]] = [[] for _ in range(self.world_size)]
        for info, pieces in zip(self.infos, self.pieces):
            metadata = None if replicated else global_metadata(info, pieces)
            for piece in pieces:
                table = self._table(info, piece, metadata)
                per_rank[piece.rank].append(table)
                by_id[id(table)] = piece
        self.groups_per_rank: list[list[GroupedEmbeddingConfig]] = group_tables(per_rank)
        self.pieces_per_rank = [
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

    def _table(
        self, info: EmbeddingShardingInfo, piece: Piece, metadata: ShardedTensorMetadata | None
    ) -> ShardedEmbeddingTable:
        config = info.embedding_config
        pooling = getattr(config, "pooling", PoolingType.NONE) if self.pooled else PoolingType.NONE
        if self._divided_later(piece.table):
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
            local_rows=piece.rows,
            local_cols=piece.cols,
            local_metadata=piece.metadata,
            global_metadata=metadata,
            fused_params=info.fused_params,
        )

    def _cut_slots(self) -> list[tuple[int, int] | None]:
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        result: list[tuple[int, int] | None] = []
        for slot in self.slots:
            edges = self.row_edges(slot.piece)
            if len(edges) == 2:
                result.append(None)
            else:
                cut = known.setdefault((slot.feature, edges), len(known))
                result.append((cut, edges.index(slot.piece.row_start)))
        self.cuts = list(known)
        return result

    @property
    def num_buckets(self) -> int:
        """The most row pieces that a column has; 0 when nothing is cut."""
        return max((len(edges) - 1 for _, edges in self.cuts), default=0)

    def _divided_later(self, table: int) -> bool:
        """Whether sums of a MEAN table are divided by the bag's length after the exchange, not by the kernel.

        A row piece cannot see the whole bag; and the backward of FBGEMM's CPU kernel forgets to divide weighted bags.
        """
        config = self.infos[table].embedding_config
        cut = any(p.rows != config.num_embeddings for p in self.pieces[table])
        return self.pooled and getattr(config, "pooling", None) is PoolingType.MEAN and (cut or self.is_weighted)

    def _place_outputs(self) -> None:
        spots: dict[tuple[int, str], list[int]] = {}
        for i, slot in enumerate(self.slots):
            spots.setdefault((slot.piece.table, slot.feature), []).append(i)
        for table, info in enumerate(self.infos):
            config = info.embedding_config
            for feature, name in zip(config.feature_names, info.names()):
                columns: dict[int, list[int]] = {}
                for i in spots[table, feature]:
                    columns.setdefault(self.slots[i].piece.col_start, []).append(i)
                if self._divided_later(table):
                    self.mean.append(len(self.outputs))
                self.outputs.append((name, config.embedding_dim, feature))
                self.sums.append(
                    [sorted(columns[start], key=lambda i: self.slots[i].piece.row_start) for start in sorted(columns)]
                )

    @property
    def widths(self) -> list[int]:
        """Columns of each slot."""
        return [slot.piece.cols for slot in self.slots]

    def widths_per_rank(self) -> list[list[int]]:
        """Columns of the slots of each rank."""
        widths, at, result = self.widths, 0, []
        for count in self.slots_per_rank:
            result.append(widths[at : at + count])
            at += count
        return result

    def row_edges(self, piece: Piece) -> tuple[int, ...]:
        """Where the rows of the piece's column are cut, from 0 to the table's rows: ``(0, rows)`` when they are not."""
        column = [p for p in self.pieces[piece.table] if p.col_start == piece.col_start]
        return (0, *sorted(p.row_stop for p in column))


def check_kind(infos: Sequence[EmbeddingShardingInfo], kind: ShardingType) -> None:
    """Refuse tables of another sharding type.

    Raises:
        ConfigError: naming the table.
    """
    for info in infos:
        got = info.param_sharding.sharding_type
        if got != kind.value:
            raise ConfigError(f"table {info.embedding_config.name!r} is planned {got}; this sharding is {kind.value}")
