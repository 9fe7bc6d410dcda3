"""Quantized collections as one op call each: pooled and unpooled lookups over packed tables in one buffer.

A table is cut into column pieces (one piece when it is not sharded by columns). Every (feature, piece) pair is a
feature of the op, in the module's feature order, so the op writes its output already concatenated. Everything that
depends on the tables alone is computed when the module is built; forward only runs.

Shape suffixes: F features, B batch, N ids, D output columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, InputError, NotFoundError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.quant.packing import padded_dim
from recinfer.quant.tbe import TableBatch, TableSlot
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["ColumnPiece", "FeatureArranger", "PooledLookup", "SequenceLookup", "embedding_names"]


@dataclass(frozen=True)
class ColumnPiece:
    """Columns ``col_start:col_stop`` of all rows of a table, packed, from byte ``offset`` of the buffer."""

    col_start: int
    col_stop: int
    offset: int


def embedding_names(configs: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """Output names in module order: the feature's name, or ``feature@table`` when several tables share the feature."""
    count: dict[str, int] = {}
    for config in configs:
        for feature in config.feature_names:
            count[feature] = count.get(feature, 0) + 1
    return [
        f"{feature}@{config.name}" if count[feature] > 1 else feature
        for config in configs
        for feature in config.feature_names
    ]


def _checked_pieces(
    config: BaseEmbeddingConfig, pieces: Mapping[str, Sequence[ColumnPiece]]
) -> tuple[ColumnPiece, ...]:
    if config.name not in pieces:
        raise NotFoundError(f"no packed rows for table {config.name!r}; there are: {', '.join(sorted(pieces))}")
    ordered = tuple(sorted(pieces[config.name], key=lambda piece: piece.col_start))
    edges = [0, *(piece.col_stop for piece in ordered)]
    if [piece.col_start for piece in ordered] != edges[:-1] or edges[-1] != config.embedding_dim:
        spans = ", ".join(f"{p.col_start}:{p.col_stop}" for p in ordered)
        raise ConfigError(
            f"table {config.name!r}: column pieces {spans} do not cover 0:{config.embedding_dim} exactly once"
        )
    return ordered


_SMALL_BAGS = 16384  # measured: 2026-11-20, docs/decisions.md


class FeatureArranger:
    """Brings a KeyedJaggedTensor's features into a fixed order (repeats allowed), and checks ids.

    The permutation for each order of keys that is met is computed once.

    Args:
        features: names in the order wanted; a repeated name reads its ids again.
        rows: of each feature's table.
    """

    def __init__(self, features: Sequence[str], rows: Sequence[int]) -> None:
        self.features = list(features)
        self.rows = list(rows)
        self._orders: dict[tuple[str, ...], list[int]] = {}
        # Unsigned, because a negative id read as unsigned is huge: one comparison covers both ends.
        self._limits: dict[torch.dtype, tuple[type, np.ndarray]] = {
            torch.int64: (np.uint64, np.array(self.rows, dtype=np.uint64)),
            torch.int32: (np.uint32, np.minimum(np.array(self.rows, dtype=np.uint64), 2**31).astype(np.uint32)),
        }

    @classmethod
    def of_tables(cls, configs: Sequence[BaseEmbeddingConfig]) -> FeatureArranger:
        """Module order, every feature once: for those who look up rank by rank."""
        features = [f for c in configs for f in c.feature_names]
        return cls(features, [c.num_embeddings for c in configs for _ in c.feature_names])

    def arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` in this order; raises InputError naming what is missing."""
        keys = features.keys()
        if keys == self.features:
            return features
        order = self._orders.get(tuple(keys))
        if order is None:
            place = {key: i for i, key in enumerate(keys)}
            missing = [name for name in self.features if name not in place]
            if missing:
                raise InputError(f"features {', '.join(sorted(set(missing)))} are missing; got {', '.join(keys)}")
            order = [place[name] for name in self.features]
            if len(self._orders) < 64:  # clients send a handful of orders; a hostile one must not grow this
                self._orders[tuple(keys)] = order
        if _is_small(features, len(order)) and _checks_run():
            return self._permuted(features, order)
        return features.permute(order)

    def _permuted(self, features: KeyedJaggedTensor, order: list[int]) -> KeyedJaggedTensor:
        """``permute`` by FBGEMM's op: a third of the time of slicing tensors, until bags are many (it copies each)."""
        lengths_FB = features.lengths().view(-1, features.stride())
        lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data.default(
            torch.tensor(order, dtype=torch.int32), lengths_FB, features.values(), features.weights_or_none()
        )
        return KeyedJaggedTensor.from_parts_unchecked(
            self.features, values, lengths.view(-1), weights=weights, stride=features.stride()
        )

    def check(self, arranged: KeyedJaggedTensor) -> None:
        """Refuse out-of-range ids, naming the first; ``arranged`` must be in this order. Meta tensors hold none.

        Raises:
            InputError: an id is out of range, or ids are not int32 or int64.
        """
        values = arranged.values()
        if values.numel() == 0 or values.device.type == "meta":
            return
        if values.dtype not in self._limits:
            raise InputError(f"ids: got {values.dtype}; expected torch.int32 or torch.int64")
        if not self._in_range(values, arranged.offsets(), arranged.stride()):
            self._refuse(arranged)

    def _in_range(self, values_N: Tensor, offsets: Tensor, batch: int) -> bool:
        if values_N.device.type != "cpu":
            lengths_F = offsets[batch::batch] - offsets[:-1:batch]
            limits_F = torch.tensor(self.rows, device=values_N.device)
            limits_N = torch.repeat_interleave(limits_F, lengths_F, output_size=values_N.numel())
            return bool(((values_N >= 0) & (values_N < limits_N)).all())
        # The largest id of each feature in one vectorised pass; FBGEMM's own checker takes 3 ns an id, this 0.2.
        unsigned, limits = self._limits[values_N.dtype]
        edges = offsets.numpy()[::batch]
        starts, stops = edges[:-1], edges[1:]
        filled = stops > starts
        if not filled.all():
            starts, limits = starts[filled], limits[filled]
        return bool((np.maximum.reduceat(values_N.numpy().view(unsigned), starts) < limits).all())

    def _refuse(self, arranged: KeyedJaggedTensor) -> None:
        batch = arranged.stride()
        offsets = arranged.offsets().tolist()
        for i, (name, rows) in enumerate(zip(self.features, self.rows)):
            start, stop = offsets[i * batch], offsets[(i + 1) * batch]
            ids = arranged.values()[start:stop]
            bad = ((ids < 0) | (ids >= rows)).nonzero()
            if len(bad):
                position = int(bad[0])
                sample = (
                    int(
                        torch.searchsorted(
                            arranged.offsets()[i * batch : (i + 1) * batch + 1], start + position, right=True
                        )
                    )
                    - 1
                )
                raise InputError(
                    f"feature {name!r}, sample {sample}: id {int(ids[position])} is out of range; "
                    f"its table has rows 0 to {rows - 1}"
                )
        raise AssertionError("the checker refused ids that a second look finds in range")


def _is_small(features: KeyedJaggedTensor, num_features: int) -> bool:
    """Whether features are on CPU, of one batch size, and so few bags that copying each is cheaper than slicing."""
    return (
        features.values().device.type == "cpu"
        and not features.variable_stride_per_key()
        and 0 < features.stride() * num_features <= _SMALL_BAGS
    )


def _checks_run() -> bool:
    # A traced program keeps only the op: data-dependent errors do not trace, and exported graphs check at their edge.
    return not torch.compiler.is_compiling()


class PooledLookup(nn.Module):
    """All pooled tables of one device behind one op call.

    Args:
        configs: the tables in module order; ``data_type`` is the packed precision.
        pieces: table -> its column pieces, together covering the table's columns.
        buffer: uint8, 1-D, holding every piece.
        is_weighted: whether ids carry weights.
        row_alignment: of the packed rows.
        output_dtype: float32 or float16.

    ``forward(features) -> KeyedTensor``, keys in module order, values [B, sum of dims].
    """

    _real_columns: Tensor | None

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        pieces: Mapping[str, Sequence[ColumnPiece]],
        buffer: Tensor,
        *,
        is_weighted: bool = False,
        row_alignment: int = 1,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.is_weighted = is_weighted
        self.names = embedding_names(configs)
        self.dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        slots: list[TableSlot] = []
        feature_slots: list[int] = []
        feature_names: list[str] = []
        columns: list[int] = []  # of the op's output, those that are real
        column = 0
        for config in configs:
            table_pieces = _checked_pieces(config, pieces)
            first = len(slots)
            slots += [
                TableSlot(config.name, config.num_embeddings, p.col_stop - p.col_start, config.data_type, p.offset)
                for p in table_pieces
            ]
            for feature in config.feature_names:
                for k, piece in enumerate(table_pieces):
                    feature_slots.append(first + k)
                    feature_names.append(feature)
                    width = piece.col_stop - piece.col_start
                    columns += range(column, column + width)
                    column += padded_dim(width, config.data_type)
        poolings = {c.pooling for c in configs}
        if not poolings <= {PoolingType.SUM, PoolingType.MEAN}:
            raise ConfigError(f"pooled tables need SUM or MEAN pooling; got {sorted(p.value for p in poolings)}")
        # SUM and MEAN tables share one call: MEAN of the op is its SUM times 1/length, so a mixed module sums all and
        # scales its MEAN columns, which gives the same bits.
        mixed = len(poolings) > 1
        op_pooling = PoolingType.SUM if mixed else poolings.pop()
        self.batch = TableBatch(
            slots, feature_slots, op_pooling, buffer, row_alignment=row_alignment, output_dtype=output_dtype
        )
        self._run = self.batch.forward  # past nn.Module's call machinery, which costs as much as the op's dispatch
        rows = [slots[i].rows for i in feature_slots]
        self.arranger = FeatureArranger(feature_names, rows)
        real = None if len(columns) == column else torch.tensor(columns, device=buffer.device)
        self.register_buffer("_real_columns", real, persistent=False)
        self._mean_runs = _mean_runs(configs, pieces) if mixed else []
        self._column_offsets = [0, *accumulate(self.dims)]

    def forward(self, features: KeyedJaggedTensor, *, check: bool = True) -> KeyedTensor:
        """Look up. ``check=False`` skips the id check for ids that the caller has checked.

        Raises:
            InputError: a feature is missing, an id is out of range, weights are missing.
        """
        arranged = self.arranger.arrange(features)
        if check and _checks_run():
            self.arranger.check(arranged)
        weights = None
        if self.is_weighted:
            weights = arranged.weights_or_none()
            if weights is None:
                raise InputError("weights are missing; this collection is weighted and needs one weight per id")
        offsets = arranged.offsets()
        out_BD = self._run(arranged.values(), offsets, weights)
        if self._mean_runs:
            self._scale_means(out_BD, offsets)
        if self._real_columns is not None:
            out_BD = out_BD.index_select(1, self._real_columns)
        return KeyedTensor.from_parts_unchecked(self.names, self.dims, out_BD, self._column_offsets)

    def _scale_means(self, out_BD: Tensor, offsets: Tensor) -> None:
        num_features = len(self.arranger.features)
        lengths_FB = (offsets[1:] - offsets[:-1]).view(num_features, -1)
        for first, last, column, width in self._mean_runs:
            inverse_BF = (1.0 / lengths_FB[first:last].clamp(min=1).float()).t()
            run = out_BD[:, column : column + (last - first) * width]
            run.view(-1, last - first, width).mul_(inverse_BF.to(run.dtype).unsqueeze(2))


def _mean_runs(
    configs: Sequence[EmbeddingBagConfig], pieces: Mapping[str, Sequence[ColumnPiece]]
) -> list[tuple[int, int, int, int]]:
    """(first op feature, last + 1, first column, padded width) of neighbouring MEAN features of one width."""
    runs: list[tuple[int, int, int, int]] = []
    feature = column = 0
    for config in configs:
        for _ in config.feature_names:
            for piece in sorted(pieces[config.name], key=lambda p: p.col_start):
                width = padded_dim(piece.col_stop - piece.col_start, config.data_type)
                if config.pooling is PoolingType.MEAN:
                    if runs and runs[-1][1] == feature and runs[-1][3] == width:
                        runs[-1] = (runs[-1][0], feature + 1, runs[-1][2], width)
                    else:
                        runs.append((feature, feature + 1, column, width))
                feature += 1
                column += width
    return runs


class SequenceLookup(nn.Module):
    """All unpooled tables of one device: one op call per padded width (the op's restriction).

    Args: as :class:`PooledLookup`; ``forward(features) -> dict[str, JaggedTensor]`` in module order, values [N_f, dim].
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingConfig],
        pieces: Mapping[str, Sequence[ColumnPiece]],
        buffer: Tensor,
        *,
        row_alignment: int = 1,
        output_dtype: torch.dtype = torch.float32,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        self.need_indices = need_indices
        self.names = embedding_names(configs)
        self.dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        features = [f for c in configs for f in c.feature_names]
        rows = [c.num_embeddings for c in configs for _ in c.feature_names]
        self.arranger = FeatureArranger(features, rows)
        groups: dict[int, tuple[list[TableSlot], list[int], list[int]]] = {}
        # For every feature its (group, place in the group, real width) pieces, left to right.
        self._parts: list[list[tuple[int, int, int]]] = []
        feature_index = 0
        for config in configs:
            table_pieces = _checked_pieces(config, pieces)
            for _ in config.feature_names:
                parts = []
                for piece in table_pieces:
                    width = piece.col_stop - piece.col_start
                    slots, feature_slots, members = groups.setdefault(padded_dim(width, config.data_type), ([], [], []))
                    slot = TableSlot(config.name, config.num_embeddings, width, config.data_type, piece.offset)
                    if slot not in slots:
                        slots.append(slot)
                    feature_slots.append(slots.index(slot))
                    parts.append((list(groups).index(padded_dim(width, config.data_type)), len(members), width))
                    members.append(feature_index)
                self._parts.append(parts)
                feature_index += 1
        self.batches = [
            TableBatch(s, fs, PoolingType.NONE, buffer, row_alignment=row_alignment, output_dtype=output_dtype)
            for s, fs, _ in groups.values()
        ]
        everything = list(range(len(features)))
        # None: the group reads all features in their order, so nothing needs to move.
        self._members = [None if members == everything else members for _, _, members in groups.values()]

    def forward(self, features: KeyedJaggedTensor, *, check: bool = True) -> dict[str, JaggedTensor]:
        """Look up. Raises InputError as :meth:`PooledLookup.forward` does."""
        arranged = self.arranger.arrange(features)
        if check and _checks_run():
            self.arranger.check(arranged)
        outputs: list[tuple[Tensor, list[int]]] = []
        for batch, members in zip(self.batches, self._members):
            part = arranged if members is None else arranged.permute(members)
            outputs.append((batch(part.values(), part.offsets()), part.offset_per_key()))
        lengths_FB = arranged.lengths().view(len(self.arranger.features), -1)
        starts_F = arranged.offset_per_key()
        result = {}
        for i, (name, parts) in enumerate(zip(self.names, self._parts)):
            columns = []
            for group, place, width in parts:
                values, starts = outputs[group]
                columns.append(values[starts[place] : starts[place + 1], :width])
            joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
            ids = arranged.values()[starts_F[i] : starts_F[i + 1]] if self.need_indices else None
            result[name] = JaggedTensor(values=joined, lengths=lengths_FB[i], weights=ids)
        return result
