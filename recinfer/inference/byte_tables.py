"""Lookups from a request's bytes: the interface between a server's byte paths and an archive's tables, wherever their rows are.

Tables prepare one lookup per order of a request's keys. A prepared lookup is either ready (its rows are in this process) or
awaited (its rows come later, from other hosts). A new place for rows needs one subclass of :class:`ByteTables` and one of
:class:`ReadyLookup` or :class:`AwaitedLookup`; the byte paths in recinfer.serving.engine stay as they are.

A lookup in :class:`DirectTables` is ready: their rows are in this process's memory. It runs the compiled loop of recinfer.quant
from lengths and ids to the response's bytes, in one call. The operator's 13 microseconds come with several times as much for
arrays, tensors and dispatch, and in a server with cold caches several times that. Unusual requests (an id out of range, an
unknown feature) take the ordinary path, which reports the error.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recinfer.lru import LruCache
from recinfer.quant._tables import pack as _pack
from recinfer.quant._tables import pool as _pool
from recinfer.quant.bags import BagPlaces
from recinfer.quant.formats.registry import row_format
from recinfer.quant.lookup import PooledLookup

if TYPE_CHECKING:
    from recinfer.quant.tbe import TableBatch

__all__ = [
    "MAX_HEADS",
    "AwaitedLookup",
    "ByteTables",
    "DirectLookup",
    "DirectPieces",
    "DirectTables",
    "KeyBlock",
    "PreparedLookup",
    "ReadyLookup",
    "Rows",
    "RowsCallback",
]

MAX_HEADS = 64
"""Most ``heads`` that a prepared lookup keeps."""

_MAX_ORDERS = 256  # orders of keys that are remembered; clients send a handful
_INT32_BYTES = 4  # size of a length in a request
_ALL = 0, -1

KeyBlock = bytes | tuple[bytes, bytes]
"""The bytes of a request's keys, or of its keys and of its context's keys."""


@dataclass(frozen=True, eq=False)
class PreparedLookup:
    """The lookup of one order of a request's keys.

    Attributes:
        names, dims: of the outputs, in the module's order.
        columns: sum of ``dims``.
        complete: whether every feature of the model is there.
        keys: of the request, and of its context.
        heads: bytes that a caller writes before responses, by key.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    columns: int
    complete: bool
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    heads: LruCache[Any, bytes] = field(default_factory=partial(LruCache, MAX_HEADS), kw_only=True)


class ReadyLookup(PreparedLookup):
    """A lookup of rows in this process."""

    def after(self, head: bytes, data: bytes, bags: BagPlaces) -> bytes | None:
        """``head``, followed by the pooled vectors of a request without context; None if an id is out of range.

        Args:
            data: the request.
            bags: of the request, in ``data``.
        """
        raise NotImplementedError

    def fill(
        self,
        into: NDArray[np.float32],
        data: bytes,
        bags: BagPlaces,
        part: tuple[int, int] | None,
        context: BagPlaces | None,
    ) -> bool:
        """Write pooled vectors ``into`` a float32 array ``[samples, columns]``; False if an id is out of range.

        Args:
            part: first sample and number of samples; None: all.
            context: bags of the context, which applies to every sample.
        """
        raise NotImplementedError


class Rows(Protocol):
    """The pooled vectors of one request, once they are here. Any thread may call it."""

    def after(self, head: bytes) -> bytes:
        """``head``, followed by the vectors of all samples."""
        ...

    def fill(self, into: NDArray[np.float32], part: tuple[int, int] | None) -> bool:
        """Write the vectors of all samples or of a part (first sample, number of samples) ``into`` an array; True."""
        ...


RowsCallback = Callable[["Rows | None", "tuple[int, ...]", "Exception | None"], None]
"""Receives the rows (None after an error), the ranks that did not answer, and the error; once, on any thread."""


class AwaitedLookup(PreparedLookup):
    """A lookup of rows that come later."""

    def start(
        self,
        data: bytes,
        bags: BagPlaces,
        deadline: float,
        done: RowsCallback,
        trace: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Start the lookup of a request.

        Args:
            data: the request.
            bags: of the request, in ``data``.
            deadline: ``time.monotonic()`` after which nobody waits.
            done: receives the result, possibly before this returns.
            trace: headers of the request's trace, for other hosts.

        Returns:
            False if an id is out of range; ``done`` is not called then.
        """
        raise NotImplementedError

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """Call ``function`` once, when the thread that calls back has nothing more to call back; from that thread only."""
        raise NotImplementedError


class ByteTables(abc.ABC):
    """The tables of a model whose only embedding module is pooled and unweighted. Any thread may call it.

    Args:
        features, names, dims: of the module's outputs.
        takes_context: whether requests may have a context.
    """

    def __init__(
        self, features: Iterable[str], names: Sequence[str], dims: Sequence[int], *, takes_context: bool
    ) -> None:
        self.takes_context = takes_context
        self._features, self._names, self._dims = tuple(features), tuple(names), tuple(dims)
        self._known = frozenset(self._features)
        self._orders: LruCache[KeyBlock, PreparedLookup] = LruCache(_MAX_ORDERS)

    def order(self, block: KeyBlock) -> PreparedLookup | None:
        """The lookup that :meth:`learn` prepared for these bytes; None if there is none."""
        return self._orders[block]

    def learn(self, block: KeyBlock, keys: Sequence[str], context: Sequence[str] = ()) -> PreparedLookup | None:
        """Prepare and remember the lookup of a request's keys and context; None unless they are distinct known features."""
        places = {key: place for place, key in enumerate(keys)}
        beside = {key: place for place, key in enumerate(context)}
        all_keys = places.keys() | beside.keys()
        if not places or len(all_keys) != len(keys) + len(context) or not self._known.issuperset(all_keys):
            return None
        lookup = self._orders[block] = self._prepare(places, beside, len(all_keys) == len(self._known))
        return lookup

    @abc.abstractmethod
    def _prepare(self, places: Mapping[str, int], beside: Mapping[str, int], complete: bool) -> PreparedLookup:
        """The lookup of keys by their places in the request and, ``beside``, in its context."""


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
