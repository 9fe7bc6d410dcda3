"""Lookups from a request's bytes: the interface between a server's byte paths and an archive's tables, wherever their rows are.

Tables prepare one lookup per order of a request's keys. A prepared lookup is either ready (its rows are in this process) or
awaited (its rows come later, from other hosts). A new place for rows needs one subclass of :class:`ByteTables` and one of
:class:`ReadyLookup` or :class:`AwaitedLookup`; the byte paths in recinfer.serving.engine stay as they are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recinfer.lru import LruCache
from recinfer.quant.bags import BagPlaces

__all__ = [
    "MAX_HEADS",
    "AwaitedLookup",
    "ByteTables",
    "KeyBlock",
    "PreparedLookup",
    "ReadyLookup",
    "Rows",
    "RowsCallback",
]

MAX_HEADS = 64
"""Most ``heads`` that a prepared lookup keeps."""

_MAX_ORDERS = 256  # orders of keys that are remembered; clients send a handful

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
        """Prepare and remember the lookup of a request's keys and of its context's; None unless they are distinct features
        of the model."""
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
