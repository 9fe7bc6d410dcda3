"""The vocabulary of one table as plain data: the row of each known id, and the rows that unknown ids read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.excerpts import some

__all__ = [
    "MAX_SEGMENTS",
    "MAX_VOCABULARY_ROWS",
    "Segment",
    "TableVocabulary",
    "check_segments",
    "even_segments",
    "segments_of",
]

MAX_SEGMENTS = 1 << 16
MAX_VOCABULARY_ROWS = 1 << 32
"""Most rows of a table with a vocabulary; an index stores a row in 4 bytes."""
_MAX_HASH_SIZE = 2**63 - 1


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a table: those of one rank or bucket of the training.

    An id of the segment without a row of its own reads row ``miss_row + murmur3(id) % miss_rows``: one fixed row if ``miss_rows``
    is 1, a hashed row if it is more, and no row at all if it is 0 (the id is left out of its bag).
    """

    first_row: int
    num_rows: int
    miss_row: int
    miss_rows: int = 1


@dataclass(frozen=True, eq=False)
class TableVocabulary:
    """The row of each id.

    Attributes:
        ids: int64 ``[N]``, any values, each once.
        rows: int64 ``[N]``: the row of each id, each once, in the id's segment.
        num_rows: rows of the table.
        segments: in the order of their rows, which cover the table.
        input_hash_size: of S segments, id ``u`` (as unsigned 64-bit number) belongs to segment ``u // ceil(input_hash_size / S)``,
            or ``u % S`` beyond the last one. 0: to segment ``id % S``, which is never negative.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    num_rows: int
    segments: tuple[Segment, ...]
    input_hash_size: int = 0

    def check(self, name: str) -> None:
        """Raises InputError, which begins with ``name``, for data that is no vocabulary: an id or a row that occurs twice, a row
        outside the table or the id's segment, segments that do not cover the table, more ids than rows."""

        def refuse(message: str) -> InputError:
            return InputError(f"{name}: {message}")

        for what, numbers in (("ids", self.ids), ("rows", self.rows)):
            if numbers.dtype != np.int64 or numbers.ndim != 1:
                raise refuse(f"{what} are {numbers.dtype} {list(numbers.shape)}; expected int64 [N]")
        if len(self.ids) != len(self.rows):
            raise refuse(f"{len(self.ids)} ids and {len(self.rows)} rows; expected one row per id")
        if len(self.ids) > self.num_rows:
            raise refuse(f"{len(self.ids)} ids for a table of {self.num_rows} rows; expected at most one id per row")
        if problem := check_segments(self.segments, self.num_rows, self.input_hash_size):
            raise refuse(problem)
        if twice := _twice(self.ids):
            raise refuse(f"ids {some(twice, 5)} occur more than once; expected each id once")
        outside = (self.rows < 0) | (self.rows >= self.num_rows)
        if outside.any():
            at = int(outside.argmax())
            raise refuse(f"id {self.ids[at]} has row {self.rows[at]}; the table has {self.num_rows} rows")
        if twice := _twice(self.rows):
            raise refuse(f"rows {some(twice, 5)} belong to more than one id; expected one id per row")
        if len(self.segments) > 1 and len(self.ids):
            starts = np.array([segment.first_row for segment in self.segments], np.int64)
            held = np.searchsorted(starts, self.rows, side="right") - 1
            own = segments_of(self.ids, len(self.segments), self.input_hash_size)
            if (held != own).any():
                at = int((held != own).argmax())
                raise refuse(
                    f"id {self.ids[at]} has row {self.rows[at]} of segment {held[at]}, but is an id of segment {own[at]} "
                    f"(input_hash_size {self.input_hash_size}, {len(self.segments)} segments)"
                )


def check_segments(segments: Sequence[Segment], num_rows: int, input_hash_size: int) -> str:
    """The problem of the segments of a table of ``num_rows`` rows; empty without one."""
    if not 1 <= num_rows <= MAX_VOCABULARY_ROWS:
        return f"{num_rows} rows; a table with a vocabulary has 1 to {MAX_VOCABULARY_ROWS}"
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        return f"{len(segments)} segments; expected 1 to {MAX_SEGMENTS}"
    if not 0 <= input_hash_size <= _MAX_HASH_SIZE:
        return f"input_hash_size is {input_hash_size}; expected 0 to {_MAX_HASH_SIZE}"
    row = 0
    for place, segment in enumerate(segments):
        stop = segment.first_row + segment.num_rows
        if segment.first_row != row or segment.num_rows < 1:
            return (
                f"segment {place} has rows {segment.first_row} to {stop - 1}; expected at least one row from {row} on: segments "
                "follow one another without gap or overlap"
            )
        if not (0 <= segment.miss_rows <= segment.num_rows) or not (
            segment.first_row <= segment.miss_row and segment.miss_row + segment.miss_rows <= stop
        ):
            return (
                f"segment {place}, rows {row} to {stop - 1}: unknown ids read {segment.miss_rows} rows from "
                f"{segment.miss_row} on; expected rows of the segment"
            )
        row = stop
    return "" if row == num_rows else f"segments have {row} rows; the table has {num_rows}"


def even_segments(num_rows: int, count: int, *, hashed: bool = False) -> tuple[Segment, ...]:
    """``count`` segments of equal size, the last one smaller if need be, as row-wise sharding cuts a table.

    Args:
        hashed: unknown ids read a hashed row of their segment; otherwise its last row.
    """
    size = -(-num_rows // count)
    starts = [min(place * size, num_rows) for place in range(count + 1)]
    return tuple(
        Segment(start, stop - start, start, stop - start) if hashed else Segment(start, stop - start, stop - 1)
        for start, stop in pairwise(starts)
    )


def segments_of(ids: NDArray[np.int64], count: int, input_hash_size: int) -> NDArray[np.int64]:
    """The segment of each id, int64 ``[N]``; see :class:`TableVocabulary`."""
    if not input_hash_size:
        return ids % np.int64(count)
    unsigned = ids.view(np.uint64)
    block = -(-input_hash_size // count)
    within = unsigned < np.uint64(block * count)
    return np.where(within, unsigned // np.uint64(block), unsigned % np.uint64(count)).astype(np.int64)


def _twice(numbers: NDArray[np.int64]) -> list[str]:
    ordered = np.sort(numbers)
    return [str(number) for number in np.unique(ordered[1:][ordered[1:] == ordered[:-1]])]
