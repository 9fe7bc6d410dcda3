"""Quantized collections as one op call each: pooled and unpooled lookups over packed tables in one buffer.

A table is cut into column pieces (one piece when it is not sharded by columns). Every (feature, piece) pair is a
feature of the op, in the module's feature order, so the op writes its output already concatenated. Everything that
depends on the tables alone is computed when the module is built; forward only runs.

Shape suffixes: F features, B batch, N ids, D output columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, InputError, NotFoundError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.rows import padded_dim
from recinfer.quant.tbe import Memory, TableBatch, TableSlot
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["ColumnPiece", "PooledLookup", "SequenceLookup", "embedding_names"]


@dataclass(frozen=True)
class ColumnPiece:
    """Columns ``col_start:col_stop`` of all rows of a table, packed, from byte ``offset`` of the buffer of ``memory``."""

    col_start: int
    col_stop: int
    offset: int
    memory: Memory = "near"


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


def _offsets(features: KeyedJaggedTensor) -> Tensor:
    """Offsets of the bags, kept in ``features``; by FBGEMM's op, at half the time of torch's two."""
    offsets = features.offsets_or_none()
    if offsets is None:
        lengths = features.lengths()
        if lengths.dtype not in (torch.int32, torch.int64):
            lengths = lengths.long()
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum.default(lengths)
        features._offsets = offsets
    return offsets


def _check_ids(arranger: FeatureArranger, arranged: KeyedJaggedTensor, *, by_op: bool) -> None:
    """Refuse ids out of range; with ``by_op`` only those that the op takes for "skip me": it refuses the others."""
    if not by_op:
        arranger.check(arranged)
        return
    values = arranged.values()
    if values.numel() and values.min().item() < 0:
        arranger.check(arranged)


class PooledLookup(nn.Module):
    """All pooled tables of one device behind one op call.

    Args:
        configs: the tables in module order; ``data_type`` is the packed precision.
        pieces: table -> its column pieces, together covering the table's columns.
        buffer: uint8, 1-D, holding every piece.
        is_weighted: whether ids carry weights.
        row_alignment: of the packed rows.
        output_dtype: float32, float16 or bfloat16.
        managed: uint8, 1-D, holding the pieces that are not ``"near"``.

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
        managed: Tensor | None = None,
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
                TableSlot(
                    config.name, config.num_embeddings, p.col_stop - p.col_start, config.data_type, p.offset, p.memory
                )
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
            slots,
            feature_slots,
            op_pooling,
            buffer,
            row_alignment=row_alignment,
            output_dtype=output_dtype,
            managed=managed,
        )
        self._op_knows_rows = self.batch.knows_rows
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
        if torch.compiler.is_compiling():
            # A traced program keeps only the op: data-dependent errors do not trace, and it checks at its edge.
            return self._keyed(arranged, arranged.offsets(), self.batch.traced)
        offsets = _offsets(arranged)
        if check:
            _check_ids(self.arranger, arranged, by_op=self._op_knows_rows)
        try:
            return self._keyed(arranged, offsets, self._run)
        except RuntimeError:
            self.arranger.check(arranged)  # names the id that the op refused
            raise

    def _keyed(self, arranged: KeyedJaggedTensor, offsets: Tensor, run: Callable[..., Tensor]) -> KeyedTensor:
        weights = None
        if self.is_weighted:
            weights = arranged.weights_or_none()
            if weights is None:
                raise InputError("weights are missing; this collection is weighted and needs one weight per id")
        out_BD = run(arranged.values(), offsets, weights)
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
            run.view(-1, last - first, width).mul_(inverse_BF.unsqueeze(2))  # in float32, whatever the output is


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
        managed: Tensor | None = None,
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
                    slot = TableSlot(
                        config.name, config.num_embeddings, width, config.data_type, piece.offset, piece.memory
                    )
                    if slot not in slots:
                        slots.append(slot)
                    feature_slots.append(slots.index(slot))
                    parts.append((list(groups).index(padded_dim(width, config.data_type)), len(members), width))
                    members.append(feature_index)
                self._parts.append(parts)
                feature_index += 1
        self.batches = [
            TableBatch(
                s,
                fs,
                PoolingType.NONE,
                buffer,
                row_alignment=row_alignment,
                output_dtype=output_dtype,
                managed=managed,
            )
            for s, fs, _ in groups.values()
        ]
        self._op_knows_rows = all(batch.knows_rows for batch in self.batches)
        everything = list(range(len(features)))
        # None: the group reads all features in their order, so nothing needs to move.
        self._members = [None if members == everything else members for _, _, members in groups.values()]

    def forward(self, features: KeyedJaggedTensor, *, check: bool = True) -> dict[str, JaggedTensor]:
        """Look up. Raises InputError as :meth:`PooledLookup.forward` does."""
        arranged = self.arranger.arrange(features)
        if torch.compiler.is_compiling():
            return self._jagged(arranged, traced=True)
        if check:
            _check_ids(self.arranger, arranged, by_op=self._op_knows_rows)
        try:
            return self._jagged(arranged)
        except RuntimeError:
            self.arranger.check(arranged)  # names the id that the op refused
            raise

    def _jagged(self, arranged: KeyedJaggedTensor, *, traced: bool = False) -> dict[str, JaggedTensor]:
        outputs: list[tuple[Tensor, list[int]]] = []
        for batch, members in zip(self.batches, self._members):
            part = arranged if members is None else arranged.permute(members)
            run = batch.traced if traced else batch.forward
            outputs.append((run(part.values(), part.offsets()), part.offset_per_key()))
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
