"""Pooled and unpooled lookups over packed tables in this process, with one operator call per collection.

A table may be split by columns, not by rows. Every (feature, column piece) pair is a feature of the operator, in the
module's feature order, so that the operator writes concatenated output. Everything that depends on the tables alone is
computed when the module is built; forward only runs.

Shape suffixes: F features, B batch, N ids, D output columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from recinfer import fbgemm
from recinfer.errors import ConfigError, InputError, NotFoundError
from recinfer.layout.rect import tile
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.buffers import Buffers, Placed
from recinfer.quant.kernels import call_keys, table_batch
from recinfer.quant.transfers import to_device
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recinfer.quant.tbe import TableBatch

__all__ = ["PooledLookup", "SequenceCall", "SequenceLookup", "SequenceTables", "embedding_names"]


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


def _reads(
    configs: Sequence[BaseEmbeddingConfig], pieces: Mapping[str, Sequence[Placed]]
) -> list[list[tuple[str, Placed]]]:
    """For every feature in module order: its name and the column pieces that it reads, from left to right.

    Raises:
        NotFoundError: a table has no pieces.
        ConfigError: pieces that are not whole columns of their table, or do not cover the columns exactly once.
    """
    reads = []
    for config in configs:
        if config.name not in pieces:
            raise NotFoundError(f"no packed rows for table {config.name!r}; got rows of: {', '.join(sorted(pieces))}")
        by_rect = {piece.rect: piece for piece in pieces[config.name]}
        strips = tile(config.name, config.num_embeddings, config.embedding_dim, list(by_rect))
        if any(len(strip.rects) > 1 for strip in strips):
            raise ConfigError(f"table {config.name!r} is sharded by rows; one lookup needs all rows of its columns")
        reads += [[(f, by_rect[strip.rects[0]]) for strip in strips] for f in config.feature_names]
    return reads


def _offsets(features: KeyedJaggedTensor) -> Tensor:
    """Offsets of the bags, cached in ``features``; FBGEMM's operator takes half the time of torch's two."""
    offsets = features.offsets_or_none()
    if offsets is None:
        lengths = features.lengths()
        if lengths.dtype not in (torch.int32, torch.int64):
            lengths = lengths.long()
        if fbgemm.INSTALLED:
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum.default(lengths)
        else:
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
        features._offsets = offsets
    return offsets


def _check_ids(arranger: FeatureArranger, arranged: KeyedJaggedTensor, *, by_op: bool, counted: bool) -> None:
    """Refuse ids out of range; with ``by_op`` only those that the op takes for "skip me": it refuses the others. Ids on a GPU
    are not looked at where the kernel has them ``counted``: that would wait for the device."""
    if counted and arranged.values().is_cuda:
        return
    if not by_op:
        arranger.check(arranged)
        return
    values = arranged.values()
    if values.numel() and values.min().item() < 0:
        arranger.check(arranged)


class PooledLookup(nn.Module):
    """Looks up all pooled tables of one device with one operator call.

    Args:
        configs: the tables in module order; ``data_type`` is the packed precision.
        pieces: table -> its column pieces, together covering the table's columns.
        buffers: hold every piece.
        is_weighted: whether ids carry weights.
        output_dtype: float32, float16 or bfloat16.

    Attributes:
        op_is_all: the operator's output is the result: no columns are scaled or dropped after it.

    ``forward(features) -> KeyedTensor``, keys in module order, values [B, sum of dims].
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        pieces: Mapping[str, Sequence[Placed]],
        buffers: Buffers,
        *,
        is_weighted: bool = False,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.is_weighted = is_weighted
        self.names = embedding_names(configs)
        self.dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        reads = [read for of_feature in _reads(configs, pieces) for read in of_feature]
        poolings = {c.pooling for c in configs}
        if not poolings <= {PoolingType.SUM, PoolingType.MEAN}:
            raise ConfigError(f"pooled tables need SUM or MEAN pooling; got {sorted(p.value for p in poolings)}")
        # SUM and MEAN tables share one call. FBGEMM's op has one pooling: its MEAN is its SUM times 1/length, so a mixed module
        # sums all and scales its MEAN columns, which gives the same bits.
        mixed = len(poolings) > 1
        op_pooling = PoolingType.SUM if mixed else poolings.pop()
        means = {c.name for c in configs if mixed and c.pooling is PoolingType.MEAN}
        self.batch = table_batch(
            [piece for _, piece in reads],
            op_pooling,
            buffers,
            output_dtype=output_dtype,
            means=[piece.rect.table in means for _, piece in reads],
        )
        self._op_knows_rows, self._counts_ids = self.batch.knows_rows, self.batch.counts_ids
        self._run = self.batch.forward  # without nn.Module.__call__, which costs as much as the op's dispatch
        self.arranger = FeatureArranger([feature for feature, _ in reads], [piece.rect.rows for _, piece in reads])
        self._mean_runs = [] if self.batch.averages else _mean_runs(self.batch.reads, self.batch.widths, means)
        self.op_is_all = not self._mean_runs and self.batch.total_dim == sum(self.dims)
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
            _check_ids(self.arranger, arranged, by_op=self._op_knows_rows, counted=self._counts_ids)
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
        values_BD = self.batch.without_padding(out_BD)
        return KeyedTensor.from_parts_unchecked(self.names, self.dims, values_BD, self._column_offsets)

    def _scale_means(self, out_BD: Tensor, offsets: Tensor) -> None:
        num_features = len(self.arranger.features)
        lengths_FB = (offsets[1:] - offsets[:-1]).view(num_features, -1)
        for first, last, column, width in self._mean_runs:
            inverse_BF = (1.0 / lengths_FB[first:last].clamp(min=1).float()).t().to(out_BD.device)
            run = out_BD[:, column : column + (last - first) * width]
            run.view(-1, last - first, width).mul_(inverse_BF.unsqueeze(2))  # in float32, for any output dtype


def _mean_runs(reads: Sequence[Placed], widths: Sequence[int], means: Set[str]) -> list[tuple[int, int, int, int]]:
    """(first op feature, last + 1, first column, padded width) of neighbouring MEAN features of one width."""
    runs: list[tuple[int, int, int, int]] = []
    column = 0
    for number, (read, width) in enumerate(zip(reads, widths)):
        if read.rect.table in means:
            if runs and runs[-1][1] == number and runs[-1][3] == width:
                runs[-1] = (runs[-1][0], number + 1, runs[-1][2], width)
            else:
                runs.append((number, number + 1, column, width))
        column += width
    return runs


class SequenceCall(NamedTuple):
    """A kernel call for unpooled reads.

    Attributes:
        batch: the call.
        reads: their numbers.
        keys: the input's key that each takes; None: all keys in their order, so nothing needs to move.
    """

    batch: TableBatch
    reads: list[int]
    keys: list[int] | None


class SequenceTables:
    """Looks up rows of single ids in packed tables: in one kernel call, or in as many as the kernel requires (``call_keys``).

    Args:
        reads: what is read.
        keys: for each read the number of the input's key whose ids it takes; None: the keys are the reads.
        buffers, output_dtype: as of :class:`recinfer.quant.tbe.TableBatch`.
    """

    def __init__(
        self,
        reads: Sequence[Placed],
        keys: Sequence[int] | None,
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        taken = list(range(len(reads)) if keys is None else keys)
        by_call: dict[tuple[int, bool], list[int]] = {}
        for number, key in enumerate(call_keys(reads, buffers.device)):
            by_call.setdefault(key, []).append(number)
        in_order = list(range(max(taken, default=-1) + 1))
        self._reads = len(reads)
        self.calls = []
        for numbers in by_call.values():
            batch = table_batch([reads[i] for i in numbers], PoolingType.NONE, buffers, output_dtype=output_dtype)
            mine = [taken[i] for i in numbers]
            self.calls.append(SequenceCall(batch, numbers, None if mine == in_order else mine))
        self.knows_rows = all(call.batch.knows_rows for call in self.calls)
        self.counts_ids = all(call.batch.counts_ids for call in self.calls)

    def __call__(self, features: KeyedJaggedTensor, *, traced: bool = False) -> list[Tensor]:
        """Per read, ``[ids of its key, columns]``."""
        found: dict[int, Tensor] = {}
        for batch, reads, keys in self.calls:
            part = features if keys is None else features.permute(keys)
            rows = batch.rows_per_read(part.values(), part.offsets(), part.offset_per_key(), traced=traced)
            found.update(zip(reads, rows))
        return [found[number] for number in range(self._reads)]


class SequenceLookup(nn.Module):
    """Looks up all unpooled tables of one device.

    Args: as :class:`PooledLookup`; ``forward(features) -> dict[str, JaggedTensor]`` in module order, values [N_f, dim].
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingConfig],
        pieces: Mapping[str, Sequence[Placed]],
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        self.need_indices = need_indices
        self.names = embedding_names(configs)
        self.dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        self.arranger = FeatureArranger.of_tables(configs)
        reads = _reads(configs, pieces)
        keys = [number for number, of_feature in enumerate(reads) for _ in of_feature]
        self._pieces = [len(of_feature) for of_feature in reads]
        flat = [piece for of_feature in reads for _, piece in of_feature]
        self.tables = SequenceTables(flat, keys, buffers, output_dtype=output_dtype)
        self._op_knows_rows, self._counts_ids = self.tables.knows_rows, self.tables.counts_ids

    def forward(self, features: KeyedJaggedTensor, *, check: bool = True) -> dict[str, JaggedTensor]:
        """Look up. Raises InputError as :meth:`PooledLookup.forward` does."""
        arranged = self.arranger.arrange(features)
        if torch.compiler.is_compiling():
            return self._jagged(arranged, traced=True)
        if check:
            _check_ids(self.arranger, arranged, by_op=self._op_knows_rows, counted=self._counts_ids)
        try:
            return self._jagged(arranged)
        except RuntimeError:
            self.arranger.check(arranged)  # names the id that the op refused
            raise

    def _jagged(self, arranged: KeyedJaggedTensor, *, traced: bool = False) -> dict[str, JaggedTensor]:
        found = self.tables(arranged, traced=traced)
        rows = iter(found)
        lengths_FB = arranged.lengths().view(len(self.arranger.features), -1)
        if found:
            lengths_FB = to_device(lengths_FB, found[0].device)
        starts_F = arranged.offset_per_key()
        result = {}
        for i, (name, count) in enumerate(zip(self.names, self._pieces)):
            columns = [next(rows) for _ in range(count)]
            joined = columns[0] if count == 1 else torch.cat(columns, dim=1)
            ids = arranged.values()[starts_F[i] : starts_F[i + 1]] if self.need_indices else None
            result[name] = JaggedTensor(values=joined, lengths=lengths_FB[i], weights=ids)
        return result
