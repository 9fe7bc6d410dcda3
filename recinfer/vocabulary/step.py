"""The id step of vocabularies: raw ids become rows, before every other step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.part import Changes
from recinfer.archive.reader import Archive
from recinfer.lru import LruCache
from recinfer.quant.bags import BagPlaces
from recinfer.vocabulary._index import remap, remap_bytes
from recinfer.vocabulary.index import table_structs
from recinfer.vocabulary.opened import open_indexes

__all__ = ["VocabularyStep", "vocabulary_step"]

_MAX_ORDERS = 256  # stored orders of keys; clients send few different ones


class Counts(Protocol):
    """Counters that all states of a predictor share: recinfer.inference.id_steps.IdCounts."""

    @property
    def places(self) -> Mapping[str, int]:
        """Feature -> its place among the counters."""
        ...

    @property
    def found(self) -> NDArray[np.int64]:
        """Hits and misses ``[features, 2]``, by feature."""
        ...


class VocabularyStep:
    """Gives each id its row by the index of its table. Any thread may call it.

    Attributes:
        drops: features whose unknown ids have no row.
    """

    decoded_only = False

    def __init__(self, archive: Archive, deltas: Sequence[Changes], counts: Counts) -> None:
        opened = open_indexes(archive, deltas)
        self._indexes = [index for _, index in opened]
        self._tables, self._segments = table_structs(
            [(index, info.segments, info.input_hash_size) for info, index in opened]
        )
        numbers = {(info.module, info.table): number for number, (info, _) in enumerate(opened)}
        tables = archive.manifest.feature_tables
        self._table_of = {
            feature: numbers[key]
            for feature, (table, *_) in tables.items()
            if (key := (table.module, table.name)) in numbers
        }
        self.drops = frozenset(feature for feature, number in self._table_of.items() if opened[number][0].drops)
        self._counts = counts
        self._orders: LruCache[tuple[str, ...], NDArray[np.int64]] = LruCache(_MAX_ORDERS)

    def __call__(self, ids: NDArray[Any], keys: tuple[str, ...], edges: NDArray[Any]) -> NDArray[Any]:
        """See :class:`recinfer.inference.id_steps.IdStep`; an id without a row becomes -1."""
        rows = np.empty(ids.size, np.int64)
        ids = np.ascontiguousarray(ids)
        edges = np.ascontiguousarray(edges, np.int64)
        remap(self._tables, self._order(keys), self._counts.found, ids, edges, rows)
        return rows

    def from_bytes(self, data: bytes, keys: tuple[str, ...], bags: BagPlaces) -> bytes | None:
        """The bytes of the lengths and of the rows, int64, of bags in ``data``; None for lengths that do not sum up to the ids."""
        found: bytes | None = remap_bytes(
            self._tables,
            self._order(keys),
            self._counts.found,
            data,
            bags.batch,
            bags.lengths_at,
            bags.ids,
            bags.ids_at,
            bags.wide,
        )
        return found

    def _order(self, keys: tuple[str, ...]) -> NDArray[np.int64]:
        """Number of the table (-1: none) and place among the counters per key."""
        order = self._orders[keys]
        if order is None:
            places = self._counts.places
            pairs = [(self._table_of.get(key, -1), places.get(key, -1)) for key in keys]
            order = self._orders[keys] = np.array(pairs, np.int64).reshape(-1, 2)
        return order


def vocabulary_step(archive: Archive, deltas: Sequence[Changes], counts: Counts) -> VocabularyStep | None:
    """Makes the step of an archive with vocabularies."""
    return VocabularyStep(archive, deltas, counts) if archive.manifest.vocabularies else None
