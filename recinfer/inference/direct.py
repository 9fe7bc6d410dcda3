"""Pooled lookups of small requests directly from their bytes, with the compiled loop of recinfer.quant.

The operator's 13 microseconds come with several times as much for arrays, tensors and dispatch, and in a server with
cold caches several times that. This module goes from lengths and ids to the response's bytes in one call. Unusual
requests (an id out of range, an unknown feature) take the ordinary path, which reports the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recinfer.inference.byte_tables import ByteTables, ReadyLookup
from recinfer.quant._tables import pack as _pack
from recinfer.quant._tables import pool as _pool
from recinfer.quant.bags import BagPlaces
from recinfer.quant.formats.registry import row_format
from recinfer.quant.lookup import PooledLookup

if TYPE_CHECKING:
    from recinfer.quant.tbe import TableBatch

__all__ = ["DirectLookup", "DirectPieces", "DirectTables"]

_INT32_BYTES = 4  # size of a length in a request
_ALL = 0, -1


class DirectPieces:
    """The tables of one operator call, in the form of the compiled loop.

    Args:
        batch: tables in this process's memory, all of them ``"near"``.
        means: for each of its features, whether bags are averaged.

    Attributes:
        widths: columns of each feature.
    """

    def __init__(self, batch: TableBatch, means: Sequence[bool]) -> None:
        self._buffer = batch.weights.numpy()
        self._pieces = np.array(
            [
                (
                    read.offset,
                    read.rect.rows,
                    read.row_bytes(batch.storage.row_alignment),
                    read.rect.cols,
                    row_format(read.data_type).code,
                    mean,
                )
                for read, mean in zip(batch.reads, means, strict=True)
            ],
            np.int64,
        ).reshape(-1, 6)
        self.widths = [read.rect.cols for read in batch.reads]

    def pool(self, steps: NDArray[np.int64], *bags: Any) -> Any:
        """Call ``recinfer.quant._tables.pool``; the arguments are those after ``steps``."""
        return _pool(self._buffer, self._pieces, steps, *bags)

    def pack(self, steps: NDArray[np.int64], *bags: Any) -> Any:
        """Call ``recinfer.quant._tables.pack``; the arguments are those after ``steps``."""
        return _pack(self._buffer, self._pieces, steps, *bags)


@dataclass(frozen=True, eq=False)
class DirectLookup(ReadyLookup):
    """A lookup by the compiled loop.

    Attributes:
        pieces: the tables.
        steps: int64 ``[S, 3]``: key, piece and first column of each part of the answer.
        context_steps: as ``steps``, of the request's context.
    """

    pieces: DirectPieces
    steps: NDArray[np.int64]
    context_steps: NDArray[np.int64]

    def after(self, head: bytes, data: bytes, bags: BagPlaces) -> bytes | None:
        """See :class:`ReadyLookup`."""
        found: bytes | None = self.pieces.pool(self.steps, data, bags, self.columns, head)
        return found

    def fill(
        self,
        into: NDArray[np.float32],
        data: bytes,
        bags: BagPlaces,
        part: tuple[int, int] | None,
        context: BagPlaces | None,
    ) -> bool:
        """See :class:`ReadyLookup`."""
        if part is None and context is None:
            return self.pieces.pool(self.steps, data, bags, self.columns, into) is not None
        beside = None if context is None else (self.context_steps, context)
        which = part or _ALL
        return self.pieces.pool(self.steps, data, bags, self.columns, into, _INT32_BYTES, *which, beside) is not None


class DirectTables(ByteTables):
    """Tables in this process's memory.

    Args:
        lookup: the module's.
        means: for each feature of the module's op, whether bags are averaged.
        features, names, dims: feature, name and columns of each output of the module.
    """

    def __init__(
        self,
        lookup: PooledLookup,
        means: Sequence[bool],
        features: Sequence[str],
        names: Sequence[str],
        dims: Sequence[int],
    ) -> None:
        super().__init__(features, names, dims, takes_context=True)
        self._pieces = DirectPieces(lookup.batch, means)

    def _prepare(self, places: Mapping[str, int], beside: Mapping[str, int], complete: bool) -> DirectLookup:
        names, dims = [], []
        steps: list[tuple[int, int, int]] = []
        beside_steps: list[tuple[int, int, int]] = []
        column = piece = 0
        for feature, name, dim in zip(self._features, self._names, self._dims):
            first = column
            left = dim
            while left:  # a table that is cut by columns has several pieces
                width = self._pieces.widths[piece]
                if feature in places:
                    steps.append((places[feature], piece, column))
                    column += width
                elif feature in beside:
                    beside_steps.append((beside[feature], piece, column))
                    column += width
                left -= width
                piece += 1
            if column > first:
                names.append(name)
                dims.append(dim)
        return DirectLookup(
            tuple(names),
            tuple(dims),
            column,
            complete,
            (tuple(places), tuple(beside)),
            self._pieces,
            np.array(steps, np.int64).reshape(-1, 3),
            np.array(beside_steps, np.int64).reshape(-1, 3),
        )
