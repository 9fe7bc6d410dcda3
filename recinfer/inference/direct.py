"""Pooled lookups of small requests directly from their bytes, with the compiled loop of recinfer.quant.

The operator's 13 microseconds come with several times as much for arrays, tensors and dispatch, and in a server with
cold caches several times that. This module goes from lengths and ids to the response's bytes in one call. Unusual
requests (an id out of range, an unknown feature) take the ordinary path, which reports the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recinfer.lru import LruCache
from recinfer.quant._tables import pack as _pack
from recinfer.quant._tables import pool as _pool
from recinfer.quant.bags import BagPlaces
from recinfer.quant.lookup import PooledLookup

if TYPE_CHECKING:
    from recinfer.quant.tbe import TableBatch

__all__ = ["MAX_HEADS", "DirectOrder", "DirectPieces", "DirectTables"]

_INT32_BYTES = 4  # size of a length in a request
_ALL = 0, -1
_MAX_ORDERS = 256  # stored orders of keys; clients send few different ones
MAX_HEADS = 64
"""Most ``heads`` that an order keeps."""


@dataclass(frozen=True, eq=False)
class DirectOrder:
    """The prepared lookup for one order of a request's keys.

    Attributes:
        steps: int64 ``[S, 3]``: key, piece and first column of each part of the answer.
        names, dims: names and columns of the outputs, in the module's order.
        columns: sum of ``dims``.
        complete: whether every feature of the model is there.
        context_steps: ``steps`` of the request's context.
        heads: bytes that a caller writes before responses, by key.
    """

    steps: NDArray[np.int64]
    names: tuple[str, ...]
    dims: tuple[int, ...]
    columns: int
    complete: bool
    context_steps: NDArray[np.int64]
    heads: LruCache[Any, bytes] = field(default_factory=partial(LruCache, MAX_HEADS))


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
                    read.data_type.bits,
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


class DirectTables:
    """The tables of a model whose only embedding module is pooled, unweighted and in this process's memory.

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
        self.pieces = DirectPieces(lookup.batch, means)
        self._widths = self.pieces.widths
        self._features = tuple(features)
        self._names = tuple(names)
        self._dims = tuple(dims)
        self._known = frozenset(features)
        self._orders: LruCache[bytes | tuple[bytes, bytes], DirectOrder] = LruCache(_MAX_ORDERS)

    def order(self, block: bytes | tuple[bytes, bytes]) -> DirectOrder | None:
        """The order that :meth:`learn` stored for these bytes; None if there is none."""
        return self._orders[block]

    def learn(
        self, block: bytes | tuple[bytes, bytes], keys: Sequence[str], context: Sequence[str] = ()
    ) -> DirectOrder | None:
        """Store and return the order for ``block``: the keys of a request and of its context; None unless they are
        distinct features of the model."""
        at = {key: place for place, key in enumerate(keys)}
        beside = {key: place for place, key in enumerate(context)}
        all_keys = at.keys() | beside.keys()
        if not at or len(all_keys) != len(keys) + len(context) or not self._known.issuperset(all_keys):
            return None
        names, dims = [], []
        steps: list[tuple[int, int, int]] = []
        beside_steps: list[tuple[int, int, int]] = []
        column = piece = 0
        for feature, name, dim in zip(self._features, self._names, self._dims):
            first = column
            left = dim
            while left:  # a table that is cut by columns has several pieces
                width = self._widths[piece]
                if feature in all_keys:
                    into, places = (steps, at) if feature in at else (beside_steps, beside)
                    into.append((places[feature], piece, column))
                    column += width
                left -= width
                piece += 1
            if column > first:
                names.append(name)
                dims.append(dim)
        order = DirectOrder(
            np.array(steps, np.int64).reshape(-1, 3),
            tuple(names),
            tuple(dims),
            column,
            len(all_keys) == len(self._known),
            np.array(beside_steps, np.int64).reshape(-1, 3),
        )
        self._orders[block] = order
        return order

    def pool(
        self,
        order: DirectOrder,
        data: bytes,
        bags: BagPlaces,
        into: bytes | NDArray[np.float32],
        part: tuple[int, int] | None = None,
        context: BagPlaces | None = None,
    ) -> Any:
        """Float32 ``[batch, order.columns]``: see ``recinfer.quant._tables.pool``; None if an id is out of range.

        Args:
            bags: of the request, in ``data``.
            part: the first sample and the number of samples that are wanted; None: all.
            context: the bags of the context, which applies to every sample.
        """
        if part is None and context is None:
            return self.pieces.pool(order.steps, data, bags, order.columns, into)
        beside = None if context is None else (order.context_steps, context)
        return self.pieces.pool(order.steps, data, bags, order.columns, into, _INT32_BYTES, *(part or _ALL), beside)
