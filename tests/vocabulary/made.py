"""Vocabularies of random ids, and the row of each id by numpy and plain Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recinfer.vocabulary.table import Segment, TableVocabulary, even_segments, segments_of

MIN, MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max
UNUSUAL = (MIN, MAX, -1, 0, 1, MAX - 1, MIN + 1)
_MASK = 2**64 - 1


def vocabulary(
    rows: int,
    *,
    segments: tuple[Segment, ...] | int = 1,
    input_hash_size: int = 0,
    full: float = 0.8,
    hashed: bool = False,
    seed: int = 0,
) -> TableVocabulary:
    """Random ids in some of the rows of each segment, the unusual ids among them."""
    rng = np.random.default_rng(seed)
    parts = even_segments(rows, segments, hashed=hashed) if isinstance(segments, int) else segments
    high = input_hash_size or MAX
    drawn = np.unique(np.concatenate((np.array(UNUSUAL, np.int64), rng.integers(0, high, 4 * rows, np.int64))))
    own = segments_of(drawn, len(parts), input_hash_size)
    ids, held = [], []
    for number, part in enumerate(parts):
        mine = drawn[own == number]
        unusual = np.isin(mine, UNUSUAL)
        mine = np.concatenate((mine[unusual], rng.permutation(mine[~unusual])))[: int(part.num_rows * full)]
        ids.append(mine)
        held.append(part.first_row + rng.permutation(part.num_rows)[: len(mine)])
    made = TableVocabulary(np.concatenate(ids), np.concatenate(held), rows, parts, input_hash_size)
    made.check("made")
    return made


def expected_rows(vocabulary: TableVocabulary, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row of each id, -1 without one."""
    order = np.argsort(vocabulary.ids)
    known, rows = vocabulary.ids[order], vocabulary.rows[order]
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    hits = known[at] == ids if len(known) else np.zeros(len(ids), bool)
    own = segments_of(ids, len(vocabulary.segments), vocabulary.input_hash_size)
    parts = np.array([(s.miss_row, s.miss_rows) for s in vocabulary.segments])
    first, count = parts[own].T
    hashed = (murmur3(ids) % np.maximum(count, 1).astype(np.uint64)).astype(np.int64)
    missed = np.where(count == 0, -1, first + hashed)
    return np.where(hits, rows[at], missed) if len(known) else missed


def murmur3(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """MurmurHash3 (x64, 128 bits) of each id and 0, both halves joined by xor, as FBGEMM's zero_collision_hash has it."""
    with np.errstate(over="ignore"):
        one = _turned(
            _turned(ids.view(np.uint64) * np.uint64(0x87C37B91114253D5), 31) * np.uint64(0x4CF5AD432745937F), 27
        )
        one = one * np.uint64(5) + np.uint64(0x52DCE729)
        two = one * np.uint64(5) + np.uint64(0x38495AB5)
        one, two = one ^ np.uint64(16), two ^ np.uint64(16)
        one = one + two
        two = two + one
        one, two = _mixed(one), _mixed(two)
        one = one + two
        return one ^ (two + one)


def _turned(x: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return x << np.uint64(bits) | x >> np.uint64(64 - bits)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ x >> np.uint64(33)
