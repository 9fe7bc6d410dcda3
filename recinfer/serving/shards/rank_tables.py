"""One rank's part of one module on a shard server: the operator calls that look up its rows.

Shapes: S streams, B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from recinfer.archive.mapping import MappedShards
from recinfer.errors import InputError
from recinfer.inference.bags import Bags, offsets_of
from recinfer.inference.byte_tables import DirectPieces
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.buffers import Buffers
from recinfer.quant.kernels import table_batch
from recinfer.quant.lookup import SequenceTables
from recinfer.serving.shards.messages import RequestPart
from recinfer.serving.shards.rank_modules import ModuleLayout, RankModule

if TYPE_CHECKING:
    from recinfer.quant.tbe import TableBatch

__all__ = ["FLOAT_BYTES", "DirectRank", "RankTables"]

FLOAT_BYTES = 4
_BEYOND = "ids: one is beyond the rows of this rank; ranker and shard must have the same plan"


@dataclass(frozen=True, eq=False)
class DirectRank:
    """One rank's part of a module for lookups from bytes; ``steps`` ``[P, 3]``: stream, piece and first column of each pair."""

    pieces: DirectPieces
    steps: NDArray[np.int64]


class RankTables:
    """The operator calls for one rank's part of one module. Any thread may call it."""

    def __init__(self, layout: ModuleLayout, mine: RankModule, mapped: MappedShards) -> None:
        self._pooled = layout.pooled
        self._streams = len(mine.streams)
        stream_of = tuple(pair.stream for pair in mine.pairs)
        self._stream_of = None if stream_of == tuple(range(self._streams)) else stream_of
        here = {_place(shard.rect): shard for shard in mapped.module_shards[layout.info.path]}
        reads, buffers = [here[_place(pair.rect)] for pair in mine.pairs], Buffers(mapped.buffer)
        self._cols = [read.rect.cols for read in reads]
        self._rows = np.array([stream.rows for stream in mine.streams], np.uint64)
        self._least = int(self._rows.min())
        self._weighted = layout.info.is_weighted
        self._names = tuple(map(str, range(self._streams)))
        self._rank_sums = table_batch(reads, mine.pooling, buffers) if self._pooled else None
        self._rank_rows = None if self._pooled else SequenceTables(reads, stream_of, buffers)
        # The operator itself refuses ids beyond the rows (the id -1 means a pruned row, which adds nothing to a bag).
        self._op_checks = self._rank_sums is not None and self._rank_sums.knows_rows
        self.columns = sum(self._cols)
        self.direct = self._direct(mine)

    def _direct(self, mine: RankModule) -> DirectRank | None:
        """The part for small requests of a pooled, unweighted module; None for other modules."""
        if self._rank_sums is None or self._weighted:
            return None
        pieces = DirectPieces(self._rank_sums, [mine.pooling is PoolingType.MEAN] * len(self._cols))
        columns = [0, *accumulate(self._cols)][:-1]
        steps = [(pair.stream, piece, column) for piece, (pair, column) in enumerate(zip(mine.pairs, columns))]
        return DirectRank(pieces, np.array(steps, np.int64).reshape(-1, 3))

    @property
    def num_streams(self) -> int:
        """Number of streams, S."""
        return self._streams

    def answer_bytes(self, batch: int, ids: int) -> int:
        """Upper bound on the bytes of the float32 answer to a part with ``ids`` ids."""
        return FLOAT_BYTES * self.columns * (batch if self._pooled else ids)

    def find(self, part: RequestPart, batch: int) -> list[NDArray[Any]]:
        """The arrays of the answer, in order: ``[B, columns]`` for a pooled module, else ``[ids, columns]`` for each pair.

        Raises InputError for ids beyond the rank's rows, and for weights that the module does not expect, or lacks.
        """
        bags = Bags(self._names, batch, part.offsets, part.ids, part.weights)
        if not self._op_checks and not self._are_low(part.ids) and not bags.fits(self._rows):
            raise InputError(_BEYOND)
        if self._weighted != (part.weights is not None) and part.ids.size:
            raise InputError(f"weights: {'expected' if self._weighted else 'got'} weights for this module")
        if self._rank_rows is not None:
            return self._sequences(self._rank_rows, bags)
        assert self._rank_sums is not None, "tables are pooled or not"
        return [
            self._sums(self._rank_sums, bags if self._stream_of is None else _select_streams(bags, self._stream_of))
        ]

    def _are_low(self, ids: NDArray[Any]) -> bool:
        """Whether all ids are below every table's number of rows: one pass, which suffices for tables of one height."""
        unsigned = np.uint64 if ids.dtype == np.int64 else np.uint32
        return not ids.size or int(ids.view(unsigned).max()) < self._least

    def _sums(self, batch: TableBatch, bags: Bags) -> NDArray[Any]:
        weights = None if bags.weights is None else torch.from_numpy(bags.weights)
        if self._weighted and weights is None:
            weights = torch.empty(0)
        try:  # forward() directly, without the cost of nn.Module's __call__
            out_BD = batch.forward(torch.from_numpy(bags.values), torch.from_numpy(bags.offsets), weights)
        except RuntimeError as error:  # the operator's error for an id beyond its rows
            raise InputError(f"{_BEYOND} ({str(error)[:100]})") from None
        found: NDArray[Any] = batch.without_padding(out_BD).numpy()
        return found

    def _sequences(self, tables: SequenceTables, bags: Bags) -> list[NDArray[Any]]:
        out: list[Any] = [None] * len(self._cols)
        for batch, reads, streams in tables.calls:
            mine = bags if streams is None else _select_streams(bags, streams)
            edges = mine.offsets[:: mine.batch].tolist()
            rows = batch.rows_per_read(torch.from_numpy(mine.values), torch.from_numpy(mine.offsets), edges)
            for pair, of_pair in zip(reads, rows):
                out[pair] = of_pair.numpy()
        return out


def _place(rect: Rect) -> tuple[str, int, int]:
    """A key of a rectangle without its rank, so that the copies of a replicated table are mapped once."""
    return rect.table, rect.row_start, rect.col_start


def _select_streams(bags: Bags, chosen: Sequence[int]) -> Bags:
    """The streams of ``bags`` with the numbers ``chosen``, which may repeat."""
    at = list(chosen)
    edges = bags.offsets[:: bags.batch].tolist()
    pieces = [slice(edges[i], edges[i + 1]) for i in at]
    values = np.concatenate([bags.values[piece] for piece in pieces])
    weights = None if bags.weights is None else np.concatenate([bags.weights[piece] for piece in pieces])
    offsets = offsets_of(bags.lengths_FB[at], values.dtype)
    return Bags(tuple(map(str, range(len(at)))), bags.batch, offsets, values, weights)
