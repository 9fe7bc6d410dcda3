"""Where packed shards lie, and the steps every sharding shares: expand features to shards, look up, combine.

A shard is a rectangle of a table on a rank. Table-, column- and row-wise differ only in which rectangles exist, so one
layout runs them all:

- :func:`fused_pieces` merges the rectangles back into whole column pieces when their rows are neighbours in memory:
  on one CPU host all ranks are then one op call, with nothing to bucketize, copy or sum.
- :class:`RankLayout` is the general path, one rank a device: it picks the rank's features, keeps the ids that fall into
  its rows, looks up, and says which output columns its results belong to.

Shape suffixes: F features, B batch, N ids, D columns, P packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, PoolingType
from recinfer.quant.lookup import ColumnPiece
from recinfer.quant.packing import join_packed_columns, padded_dim, row_bytes
from recinfer.quant.tbe import Memory, TableBatch, TableSlot, managed_bytes
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "PackedShard",
    "RankInput",
    "RankLayout",
    "RankOrder",
    "column_parts",
    "fused_pieces",
    "joined_pieces",
    "place_shards",
    "shard_name",
]

_SLACK_BYTES = 64  # vectorised kernels may read past the last row
_ALIGNMENT = 128
_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class PackedShard:
    """Rows ``row_start:row_stop``, columns ``col_start:col_stop`` of a table, packed, on a rank.

    ``offset`` is the byte offset of its first row in the buffer it comes with; its rows follow one another, each of
    ``row_bytes(columns, precision, row_alignment)`` bytes. ``memory`` is where a GPU keeps them; on a CPU all is host
    memory.
    """

    table: str
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    rank: int
    offset: int
    memory: Memory = "near"

    @property
    def rows(self) -> int:
        """Height."""
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        """Width."""
        return self.col_stop - self.col_start


def shard_name(shard: PackedShard) -> str:
    """``table[rows, columns]@rank``, for messages."""
    span = f"{shard.row_start}:{shard.row_stop}, {shard.col_start}:{shard.col_stop}"
    return f"{shard.table}[{span}]@{shard.rank}"


ColumnParts = dict[tuple[int, int], list[PackedShard]]
"""Of one table: columns -> its row pieces from top to bottom; columns from left to right."""


def column_parts(configs: Sequence[BaseEmbeddingConfig], shards: Sequence[PackedShard]) -> dict[str, ColumnParts]:
    """The shards of every table in the order in which they cover it.

    Raises:
        ConfigError: the shards of a table do not cover it exactly once.
    """
    by_table: dict[str, list[PackedShard]] = {config.name: [] for config in configs}
    for shard in sorted(shards, key=lambda s: (s.col_start, s.col_stop, s.row_start, s.row_stop)):
        by_table[shard.table].append(shard)
    return {config.name: _column_parts(config, by_table[config.name]) for config in configs}


def _column_parts(config: BaseEmbeddingConfig, shards: Sequence[PackedShard]) -> ColumnParts:
    columns: ColumnParts = {}
    for shard in shards:
        columns.setdefault((shard.col_start, shard.col_stop), []).append(shard)
    at = 0
    for (start, stop), parts in columns.items():
        edges = [0, *(part.row_stop for part in parts)]
        if start != at or [part.row_start for part in parts] != edges[:-1] or edges[-1] != config.num_embeddings:
            break
        at = stop
    else:
        if at == config.embedding_dim:
            return columns
    raise ConfigError(
        f"table {config.name!r}: shards {'; '.join(map(shard_name, shards)) or '(none)'} do not cover its "
        f"{config.num_embeddings} rows x {config.embedding_dim} columns exactly once"
    )


def fused_pieces(
    configs: Sequence[BaseEmbeddingConfig], parts: Mapping[str, ColumnParts]
) -> dict[str, tuple[ColumnPiece, ...]] | None:
    """Whole column pieces of every table, when the row pieces of each are neighbours in the buffer; else None.

    Args:
        parts: of :func:`column_parts`; row alignment 1.
    """
    pieces: dict[str, tuple[ColumnPiece, ...]] = {}
    for config in configs:
        merged = []
        for (start, stop), rows in parts[config.name].items():
            width = row_bytes(stop - start, config.data_type)
            if any(part.offset != rows[0].offset + part.row_start * width for part in rows):
                return None
            merged.append(ColumnPiece(start, stop, rows[0].offset))
        pieces[config.name] = tuple(merged)
    return pieces


_JOIN_BYTES = 8 << 20  # of whole rows a step: temporary memory stays bounded


def joined_pieces(
    configs: Sequence[BaseEmbeddingConfig], pieces: Mapping[str, Sequence[ColumnPiece]], buffer: Tensor
) -> tuple[dict[str, tuple[ColumnPiece, ...]], Tensor, Tensor | None]:
    """Tables that are cut by columns put together again.

    A cut table costs a row's cache misses once a piece, and its ids once more for the op to read. Whole rows cost
    their bytes a second time, in memory that no other process shares. Where the uncut tables are no more than the cut
    ones, all move: the op checks ids itself only where all tables lie in one buffer, in order.

    Args:
        pieces: table -> its pieces in ``buffer`` (row alignment 1).

    Returns:
        the pieces, their buffer, and a second one that joined tables lie in (None: all lie in the first).
    """
    sizes = {c.name: c.num_embeddings * row_bytes(c.embedding_dim, c.data_type) for c in configs}
    cut = [c for c in configs if len(pieces[c.name]) > 1]
    whole = {name: tuple(parts) for name, parts in pieces.items()}
    if not cut:
        return whole, buffer, None
    cut_bytes = sum(sizes[c.name] for c in cut)
    moved = list(configs) if sum(sizes.values()) <= 2 * cut_bytes else cut
    new = torch.zeros(sum(sizes[c.name] for c in moved) + _SLACK_BYTES, dtype=torch.uint8)
    at = 0
    for config in moved:
        size = sizes[config.name]
        _join(config, pieces[config.name], buffer, new[at : at + size].view(config.num_embeddings, -1))
        where = ColumnPiece(0, config.embedding_dim, at)
        whole[config.name] = (where if moved is not cut else replace(where, memory="managed"),)
        at += size
    return (whole, buffer, new) if moved is cut else (whole, new, None)


def _join(config: BaseEmbeddingConfig, pieces: Sequence[ColumnPiece], buffer: Tensor, out_RP: Tensor) -> None:
    """Packed rows from their pieces, some at a time."""
    step = max(1, _JOIN_BYTES // out_RP.shape[1])
    for first in range(0, config.num_embeddings, step):
        last = min(first + step, config.num_embeddings)
        parts = []
        for piece in pieces:
            width = row_bytes(piece.col_stop - piece.col_start, config.data_type)
            span = buffer[piece.offset + first * width : piece.offset + last * width]
            parts.append((piece.col_start, piece.col_stop, span.view(last - first, width)))
        if len(parts) == 1:
            out_RP[first:last] = parts[0][2]
            continue
        out_RP[first:last] = join_packed_columns(
            parts, config.embedding_dim, config.data_type, table=config.name, first_row=first
        )


def place_shards(
    configs: Sequence[BaseEmbeddingConfig],
    shards: Sequence[PackedShard],
    rows_of: Callable[[PackedShard], Tensor],
    device: torch.device,
    row_alignment: int,
) -> tuple[Tensor, Tensor | None, list[PackedShard]]:
    """Copy shards into buffers of their own for ``device``, re-padding rows to ``row_alignment``.

    Args:
        rows_of: gives a shard's packed rows, uint8 [rows, >= row_bytes at alignment 1], on CPU.

    Returns:
        the buffer in the device's memory (uint8, 1-D), the one in managed memory for shards that a GPU leaves there
        (None without any), and the shards with their offsets in the two.
    """
    types = {config.name: config.data_type for config in configs}
    placed, sizes = [], {True: 0, False: 0}
    for shard in shards:
        near = shard.memory == "near" or device.type != "cuda"
        placed.append(replace(shard, offset=sizes[near]))
        num_bytes = shard.rows * row_bytes(shard.cols, types[shard.table], row_alignment)
        sizes[near] += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.zeros(sizes[True] + _SLACK_BYTES, dtype=torch.uint8, device=device)
    managed = managed_bytes(sizes[False] + _SLACK_BYTES, device) if sizes[False] else None
    for shard, spot in zip(shards, placed):
        packed_RP = rows_of(shard)
        need = row_bytes(shard.cols, types[shard.table])
        width = row_bytes(shard.cols, types[shard.table], row_alignment)
        target = buffer if managed is None or spot.memory == "near" else managed
        view = target[spot.offset : spot.offset + shard.rows * width].view(-1, width)
        # A copy between rows of two widths passes through memory of its size on the device.
        step = max(1, _COPY_BYTES // width)
        for at in range(0, shard.rows, step):
            view[at : at + step, :need].copy_(packed_RP[at : at + step, :need])
    return buffer, managed, placed


@dataclass
class RankInput:
    """What one rank looks up: its features' ids, rebased to its rows.

    Attributes:
        features: the rank's (feature, shard) pairs as keys, in :attr:`RankLayout.names` order.
        positions: for row shards, int64 [n]: where each kept id stood among the expanded ids; None when all were kept.
    """

    features: KeyedJaggedTensor
    positions: Tensor | None


class RankOrder:
    """Which (feature, shard) pairs a rank has and which output columns they give: what follows from the shards alone.

    Args:
        configs: all tables in module order.
        shards: this rank's shards.

    Attributes:
        order: of the module's features, one a (feature, shard) pair.
        shards: of each pair.
        names: feature of each pair.
        columns: the module's output columns of this rank's real columns, in order.
        cuts_rows: whether a shard has not all rows of its table.
        slots, feature_slots: this rank's tables as the op takes them, and each pair's among them.
    """

    def __init__(self, configs: Sequence[BaseEmbeddingConfig], shards: Sequence[PackedShard]) -> None:
        self.order: list[int] = []
        self.shards: list[PackedShard] = []
        self.names: list[str] = []
        self.slots: list[tuple[PackedShard, DataType]] = []
        self.feature_slots: list[int] = []
        self.columns: list[int] = []
        self.real: list[int] = []  # this rank's op columns that are real
        by_table: dict[str, list[PackedShard]] = {}
        for shard in shards:
            by_table.setdefault(shard.table, []).append(shard)
        feature_index = op_column = column = 0
        for config in configs:
            first = len(self.slots)
            mine = sorted(by_table.get(config.name, ()), key=lambda s: (s.col_start, s.row_start))
            self.slots += [(shard, config.data_type) for shard in mine]
            for feature in config.feature_names:
                for k, shard in enumerate(mine):
                    self.order.append(feature_index)
                    self.shards.append(shard)
                    self.names.append(feature)
                    self.feature_slots.append(first + k)
                    self.columns += range(column + shard.col_start, column + shard.col_stop)
                    self.real += range(op_column, op_column + shard.cols)
                    op_column += padded_dim(shard.cols, config.data_type)
                feature_index += 1
                column += config.embedding_dim
        self.op_columns = op_column
        rows = {config.name: config.num_embeddings for config in configs}
        self.cuts_rows = any(s.rows != rows[s.table] for s in self.shards)


class RankLayout:
    """One rank's shards as one or more op calls, and how its outputs join the whole.

    Args:
        configs: all tables in module order.
        shards: this rank's shards, offsets into ``buffer``.
        buffer: packed rows on this rank's device.
        pooled: bags (summed, since MEAN is divided once, after all ranks are summed) or one row per id.
        row_alignment: of the rows in ``buffer``.
        managed: the buffer of the shards that are not ``"near"``.
        pooling: MEAN where no other rank has rows of these tables, and all of them are MEAN.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        shards: Sequence[PackedShard],
        buffer: Tensor,
        *,
        pooled: bool,
        row_alignment: int,
        managed: Tensor | None = None,
        pooling: PoolingType = PoolingType.SUM,
    ) -> None:
        self.device = buffer.device
        self._rows = (buffer, managed, row_alignment)
        ranks = RankOrder(configs, shards)
        self.order, self.shards, self.names, self.cuts_rows = ranks.order, ranks.shards, ranks.names, ranks.cuts_rows
        slots = [
            TableSlot(s.table, s.rows, s.cols, data_type, s.offset, s.memory if managed is not None else "near")
            for s, data_type in ranks.slots
        ]
        feature_slots = ranks.feature_slots
        self._starts = torch.tensor([s.row_start for s in self.shards], device=self.device)
        self._stops = torch.tensor([s.row_stop for s in self.shards], device=self.device)
        self.columns = torch.tensor(ranks.columns, dtype=torch.int64, device=self.device)
        whole = len(ranks.real) == ranks.op_columns
        self.real = None if whole else torch.tensor(ranks.real, dtype=torch.int64, device=self.device)
        self.batches: list[TableBatch] = []
        # Unpooled batches must have one width each: (members among this rank's features, batch).
        self.members: list[list[int] | None] = []
        if pooled:
            self._add_batch(slots, feature_slots, pooling, None)
        else:
            widths = [padded_dim(slots[i].dim, slots[i].data_type) for i in feature_slots]
            for width in dict.fromkeys(widths):
                members = [i for i, w in enumerate(widths) if w == width]
                chosen = sorted({feature_slots[i] for i in members})
                remapped = [chosen.index(feature_slots[i]) for i in members]
                all_of_them = None if len(members) == len(widths) else members
                self._add_batch([slots[i] for i in chosen], remapped, PoolingType.NONE, all_of_them)

    def _add_batch(
        self,
        slots: list[TableSlot],
        feature_slots: list[int],
        pooling: PoolingType,
        members: list[int] | None,
    ) -> None:
        buffer, managed, alignment = self._rows
        if slots:
            batch = TableBatch(slots, feature_slots, pooling, buffer, row_alignment=alignment, managed=managed)
            self.batches.append(batch)
            self.members.append(members)

    def dist(self, arranged: KeyedJaggedTensor) -> RankInput | None:
        """This rank's ids from the module's (features in module order, all ids in range); None when it has no shard."""
        if not self.order:
            return None
        mine = arranged.permute(self.order).to(self.device, non_blocking=True)
        if not self.cuts_rows:
            return RankInput(mine, None)
        values_N, offsets = mine.values(), mine.offsets()
        batch = mine.stride()
        starts_F = offsets[: len(self.order) * batch + 1 : max(batch, 1)]
        lengths_F = starts_F[1:] - starts_F[:-1] if batch else torch.zeros_like(self._starts)
        start_N = torch.repeat_interleave(self._starts, lengths_F, output_size=values_N.numel())
        stop_N = torch.repeat_interleave(self._stops, lengths_F, output_size=values_N.numel())
        keep_N = (values_N >= start_N) & (values_N < stop_N)
        kept_before = torch.nn.functional.pad(keep_N.cumsum(0), (1, 0))
        new_offsets = kept_before[offsets.long()]
        positions = keep_N.nonzero().squeeze(1)
        weights = mine.weights_or_none()
        rebased = KeyedJaggedTensor.from_parts_unchecked(
            keys=list(mine.keys()),
            values=(values_N - start_N.to(values_N.dtype))[positions],
            lengths=new_offsets[1:] - new_offsets[:-1],
            offsets=new_offsets,
            weights=None if weights is None else weights[positions],
            stride=batch,
        )
        return RankInput(rebased, positions)

    def pooled(self, rank_input: RankInput, is_weighted: bool) -> Tensor:
        """Sums over this rank's ids, float32 [B, real columns of this rank]."""
        features = rank_input.features
        weights = features.weights() if is_weighted else None
        out_BD = self.batches[0](features.values(), features.offsets(), weights)
        return out_BD if self.real is None else out_BD.index_select(1, self.real)

    def sequences(self, rank_input: RankInput) -> list[Tensor]:
        """Rows of every (feature, shard) pair, float32 [ids kept, cols]."""
        features = rank_input.features
        out: list[Tensor | None] = [None] * len(self.order)
        for batch, members in zip(self.batches, self.members):
            part = features if members is None else features.permute(members)
            rows = batch(part.values(), part.offsets())
            edges = part.offset_per_key()
            for place, i in enumerate(members if members is not None else range(len(self.order))):
                out[i] = rows[edges[place] : edges[place + 1], : self.shards[i].cols]
        return [rows for rows in out if rows is not None]


def mean_columns(configs: Sequence[BaseEmbeddingConfig]) -> list[tuple[int, int, int]]:
    """(feature index, first column, last column + 1) of every MEAN feature, in module order."""
    spans, feature, column = [], 0, 0
    for config in configs:
        for _ in config.feature_names:
            if getattr(config, "pooling", None) is PoolingType.MEAN:
                spans.append((feature, column, column + config.embedding_dim))
            feature += 1
            column += config.embedding_dim
    return spans


def check_devices(ranks: Sequence[int], devices: Mapping[int, torch.device]) -> None:
    """Refuse a plan that asks for GPUs this machine does not have."""
    have = torch.cuda.device_count()
    for rank in ranks:
        device = devices[rank]
        if device.type == "cuda" and (device.index or 0) >= have:
            raise ConfigError(
                f"rank {rank} is planned on {device}, but this machine has {have} CUDA devices; "
                "plan for that many ranks, or for compute_device='cpu'"
            )
