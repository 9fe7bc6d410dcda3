"""Vocabularies of strings: a string becomes a 64-bit key, and the index of its feature's vocabulary has the row of each key.

A known string always has its own row: export tries seeds of the hash until no two of them share a key. An unknown string shares the
key of one of n known strings with a probability of n / 2^64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.paths import open_inside
from recinfer.archive.reader import Archive
from recinfer.columns import Strings, strings_of
from recinfer.errors import ArchiveError, InputError
from recinfer.excerpts import quoted, some
from recinfer.lru import LruCache
from recinfer.vocabulary._index import remap
from recinfer.vocabulary._strings import keys as write_keys
from recinfer.vocabulary.index import IdIndex, IndexShape, build_index, open_index, table_structs
from recinfer.vocabulary.info import MAX_EXAMPLES, StringInfo
from recinfer.vocabulary.step import Counts
from recinfer.vocabulary.table import TableVocabulary

__all__ = [
    "StringRows",
    "StringVocabulary",
    "check_rows",
    "open_strings",
    "read_string_shapes",
    "string_indexes",
    "string_keys",
]

_MAX_ORDERS = 256  # stored orders of features; clients send few different ones
_MOST_SEEDS = 16
_LONGEST_EXAMPLE = 80


@dataclass(frozen=True)
class StringVocabulary:
    """The row of each string of a feature.

    Attributes:
        strings: different strings; each has the row of its position.
        unknown: the row of all other strings, 0 to ``len(strings)``; None is ``len(strings)``, a row of its own.
    """

    strings: tuple[str, ...]
    unknown: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.strings, str | bytes):
            raise InputError(f"vocabulary of strings: got {quoted(str(self.strings), 40)}; expected a list of strings")
        object.__setattr__(self, "strings", tuple(self.strings))
        if odd := [one for one in self.strings if not isinstance(one, str)]:
            raise InputError(
                f"vocabulary of strings: got a {type(odd[0]).__name__}; expected strings alone, or an int64 array of ids"
            )
        if len(set(self.strings)) != len(self.strings):
            seen: set[str] = set()
            twice = next(one for one in self.strings if one in seen or seen.add(one))  # type: ignore[func-returns-value]
            raise InputError(f"vocabulary of strings: {quoted(twice)} occurs twice; expected each string once")
        if self.unknown is not None and not 0 <= self.unknown <= len(self.strings):
            raise InputError(
                f"vocabulary of strings: unknown strings read row {self.unknown}; expected 0 to {len(self.strings)}"
            )

    @property
    def unknown_row(self) -> int:
        """The row of unknown strings."""
        return len(self.strings) if self.unknown is None else self.unknown

    @property
    def rows(self) -> int:
        """Number of rows that its feature's table needs."""
        return max(len(self.strings), self.unknown_row + 1)


def string_keys(
    data: Any, lengths: NDArray[Any], seed: int, starts: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The 64-bit key of each string: SipHash-2-4 of its bytes with the key (seed, 0).

    Args:
        data: bytes of the strings.
        lengths: int32 or int64 ``[N]``, in bytes.
        seed: 0 to 2^64 - 1.
        starts: int64 ``[N]``, the first byte of each; None: the strings follow one another and fill ``data``.

    Returns:
        int64 ``[N]``.
    """
    out = np.empty(len(lengths), np.int64)
    write_keys(data, starts, np.ascontiguousarray(lengths), seed, 0, out)
    return out


def string_indexes(vocabularies: Mapping[str, StringVocabulary]) -> list[tuple[StringInfo, IdIndex]]:
    """The manifest's entries and the indexes for the vocabulary of each feature; features of equal vocabularies share one.

    Raises:
        InputError: a string with a lone surrogate.
    """
    features: dict[StringVocabulary, list[str]] = {}
    for feature, vocabulary in vocabularies.items():
        features.setdefault(vocabulary, []).append(feature)
    found = []
    for vocabulary, names in features.items():
        texts = strings_of(f"vocabulary of feature {names[0]!r}", vocabulary.strings)
        seed, keys = _distinct_keys(texts)
        short = [(at, one) for at, one in enumerate(vocabulary.strings[:1000]) if len(one) <= _LONGEST_EXAMPLE]
        examples = {one: at for at, one in short[:MAX_EXAMPLES]}
        info = StringInfo(tuple(names), "siphash-2-4", seed, vocabulary.rows, vocabulary.unknown_row, examples)
        rows = np.arange(len(keys), dtype=np.int64)
        found.append((info, build_index(TableVocabulary(keys, rows, info.rows, info.segments))))
    return found


def _distinct_keys(texts: Strings) -> tuple[int, NDArray[np.int64]]:
    """The first seed with which all strings have different keys, and these keys."""
    for seed in range(_MOST_SEEDS):
        keys = string_keys(texts.data, texts.lengths, seed)
        if len(np.unique(keys)) == len(keys):
            return seed, keys
    raise AssertionError("different strings have equal 64-bit keys with every seed")


class StringRows:
    """The rows of strings, by the indexes of an archive. Any thread may call it.

    Attributes:
        features: features whose ids may be strings.
    """

    def __init__(self, opened: Sequence[tuple[StringInfo, IdIndex]], counts: Counts) -> None:
        self._opened = list(opened)  # keeps the mapped buckets
        self._tables, self._segments = table_structs([(index, info.segments, 0) for info, index in opened])
        self._number = {feature: at for at, (info, _) in enumerate(opened) for feature in info.features}
        self._seeds = {feature: info.seed for info, _ in opened for feature in info.features}
        self.features = frozenset(self._number)
        self._counts = counts
        self._orders: LruCache[tuple[str, ...], NDArray[np.int64]] = LruCache(_MAX_ORDERS)

    def info(self, feature: str) -> tuple[StringInfo, IndexShape]:
        """The manifest's entry of a feature, and the sizes of its index."""
        info, index = self._opened[self._number[feature]]
        return info, index.shape

    def rows(self, strings: Strings, counts: Sequence[int]) -> NDArray[np.int64]:
        """The row of each string, int64 ``[N]``; ``counts``: how many each of ``strings.keys`` has.

        Raises:
            InputError: a feature whose ids are integers.
        """
        if strange := [key for key in strings.keys if key not in self.features]:
            known = some(sorted(self.features)) if self.features else "none; export with --vocabulary to add one"
            raise InputError(
                f"features[{strange[0]!r}]: got strings, expected integer ids; features that take strings: {known}"
            )
        edges = np.zeros(len(strings.keys) + 1, np.int64)
        np.cumsum(counts, out=edges[1:])
        seeds = {self._seeds[key] for key in strings.keys}
        if len(seeds) == 1:
            keys = string_keys(strings.data, strings.lengths, seeds.pop())
        else:
            ends = np.concatenate(([0], np.cumsum(strings.lengths, dtype=np.int64)))
            keys = np.concatenate(
                [
                    string_keys(strings.data[ends[a] : ends[b]], strings.lengths[a:b], self._seeds[key])
                    for key, a, b in zip(strings.keys, edges, edges[1:])
                ]
            )
        return self._remapped(strings.keys, keys, edges)

    def rows_of(
        self, feature: str, data: Any, starts: NDArray[np.int64], lengths: NDArray[np.int64], *, count: bool = True
    ) -> NDArray[np.int64]:
        """The row of each string of one feature in ``data``; see :func:`string_keys`. ``count``: as ids of requests."""
        keys = string_keys(data, lengths, self._seeds[feature], starts)
        return self._remapped((feature,), keys, np.array([0, len(keys)], np.int64), count)

    def _remapped(
        self, features: tuple[str, ...], keys: NDArray[np.int64], edges: NDArray[np.int64], count: bool = True
    ) -> NDArray[np.int64]:
        order = self._orders[features]
        if order is None:
            pairs = [(self._number[feature], self._counts.places[feature]) for feature in features]
            order = self._orders[features] = np.array(pairs, np.int64).reshape(-1, 2)
        out = np.empty(len(keys), np.int64)
        remap(self._tables, order, self._counts.found if count else np.zeros_like(self._counts.found), keys, edges, out)
        return out


def open_strings(archive: Archive, counts: Counts) -> StringRows:
    """Map and check the vocabularies of strings of an archive.

    Raises:
        ArchiveError: V3 to V6 for an index, V8 for a key or an example that is not in it.
    """
    opened = []
    for number, info in enumerate(archive.manifest.string_vocabularies):
        path = StringInfo.path(number)
        with open_inside(archive.root, path) as file:
            index = open_index(file, path, info.rows)
        index.check(path, info.segments, 0)
        opened.append((info, index))
    found = StringRows(opened, counts)
    for number, info in enumerate(archive.manifest.string_vocabularies):
        check_rows(found, info.features[0], list(info.examples), list(info.examples.values()), StringInfo.path(number))
    return found


def check_rows(
    found: StringRows, feature: str, strings: Sequence[str], rows: Sequence[int], name: str, rule: str = "V8"
) -> None:
    """Raise ArchiveError of ``rule``, which begins with ``name``, unless each string is in the index, with its row."""
    texts = strings_of(name, strings)
    starts = np.cumsum(texts.lengths, dtype=np.int64) - texts.lengths
    read = found.rows_of(feature, texts.data, starts, texts.lengths.astype(np.int64), count=False)
    wrong = np.flatnonzero(read != np.asarray(rows, np.int64))
    if wrong.size:
        at = int(wrong[0])
        raise ArchiveError(
            f"{name}: the string {quoted(strings[at], 40)} reads row {read[at]}; expected row {rows[at]}", rule=rule
        )


def read_string_shapes(archive: Archive) -> Iterator[tuple[StringInfo, IndexShape]]:
    """The sizes of each index of strings, from its header alone."""
    for number, info in enumerate(archive.manifest.string_vocabularies):
        path = StringInfo.path(number)
        with open_inside(archive.root, path) as file:
            yield info, open_index(file, path, info.rows).shape
