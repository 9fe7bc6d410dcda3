"""Where packed shards lie, and the steps every sharding shares: expand features to shards, look up, combine.

A shard is a rectangle of a table on a rank. Table-, column- and row-wise differ only in which rectangles exist, so one
layout runs them all:

- :func:`recinfer.distributed.quant_buffers.fused_pieces` merges the rectangles back into whole column pieces when their
  rows are neighbours in memory: on one CPU host all ranks are then one op call, with nothing to bucketize, copy or sum.
- :class:`RankLayout` is the general path, one rank a device: it picks the rank's features, keeps the ids that fall into
  its rows, looks up, and says which output columns its results belong to.

Shape suffixes: F features, B batch, N ids, D columns, P packed bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, PoolingType
from recinfer.quant.rows import padded_dim
from recinfer.quant.tbe import Memory, TableBatch, TableSlot
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "PackedShard",
    "RankInput",
    "RankLayout",
    "RankOrder",
    "shard_name",
    "slot_of",
]


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


def slot_of(shard: PackedShard, data_type: DataType, managed: Tensor | None) -> TableSlot:
    """The shard as the op takes it; without a second buffer all shards are in the first."""
    memory = shard.memory if managed is not None else "near"
    return TableSlot(shard.table, shard.rows, shard.cols, data_type, shard.offset, memory)


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
        self._slots = ranks.slots
        slots = [slot_of(shard, data_type, managed) for shard, data_type in ranks.slots]
        feature_slots = ranks.feature_slots
        self._starts = torch.tensor([s.row_start for s in self.shards], device=self.device)
        self._stops = torch.tensor([s.row_stop for s in self.shards], device=self.device)
        self.columns = torch.tensor(ranks.columns, dtype=torch.int64, device=self.device)
        whole = len(ranks.real) == ranks.op_columns
        self.real = None if whole else torch.tensor(ranks.real, dtype=torch.int64, device=self.device)
        self.batches: list[TableBatch] = []
        self.batch_shards: list[list[PackedShard]] = []  # of each batch's slots
        # Unpooled batches must have one width each: (members among this rank's features, batch).
        self.members: list[list[int] | None] = []
        if pooled:
            self._add_batch(range(len(slots)), feature_slots, pooling, None)
        else:
            widths = [padded_dim(slots[i].dim, slots[i].data_type) for i in feature_slots]
            for width in dict.fromkeys(widths):
                members = [i for i, w in enumerate(widths) if w == width]
                chosen = sorted({feature_slots[i] for i in members})
                remapped = [chosen.index(feature_slots[i]) for i in members]
                all_of_them = None if len(members) == len(widths) else members
                self._add_batch(chosen, remapped, PoolingType.NONE, all_of_them)

    def _add_batch(
        self,
        slots: Sequence[int],
        feature_slots: list[int],
        pooling: PoolingType,
        members: list[int] | None,
    ) -> None:
        buffer, managed, alignment = self._rows
        if slots:
            own = [slot_of(*self._slots[i], managed) for i in slots]
            batch = TableBatch(own, feature_slots, pooling, buffer, row_alignment=alignment, managed=managed)
            self.batches.append(batch)
            self.batch_shards.append([self._slots[i][0] for i in slots])
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
