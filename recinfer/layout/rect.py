"""Rect, a rectangle of a table on a rank, and the check that rectangles tile their table.

Every cut of a table makes *strips*: column ranges side by side, each cut into rows from top to bottom. Table-wise is one
strip of one rectangle, row-wise one strip of many, column-wise many of one, a grid many of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NoReturn

from recinfer.errors import ConfigError

__all__ = ["Rect", "Strip", "TilingError", "tile"]


class TilingError(ConfigError):
    """Rectangles that do not tile their table."""


@dataclass(frozen=True, order=True, slots=True)
class Rect:
    """Rows ``[row_start, row_stop)`` x columns ``[col_start, col_stop)`` of a table on a rank.

    The constructor checks nothing: :func:`tile` does. A rectangle may have no rows, for example on the last ranks of a
    short row-wise table.

    Attributes:
        table: the table's name inside its module.
    """

    rank: int
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    table: str = ""

    @property
    def rows(self) -> int:
        """Height."""
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        """Width."""
        return self.col_stop - self.col_start

    @property
    def text(self) -> str:
        """``table[0:10, 0:64]@3``: rows, columns and rank, for messages."""
        return f"{self.table}[{self.row_start}:{self.row_stop}, {self.col_start}:{self.col_stop}]@{self.rank}"

    def overlap(self, other: Rect) -> Rect | None:
        """The intersection of two rectangles of a table, on this rectangle's rank; None if empty."""
        row_start, row_stop = max(self.row_start, other.row_start), min(self.row_stop, other.row_stop)
        col_start, col_stop = max(self.col_start, other.col_start), min(self.col_stop, other.col_stop)
        if self.table != other.table or row_start >= row_stop or col_start >= col_stop:
            return None
        return Rect(self.rank, row_start, row_stop, col_start, col_stop, self.table)


@dataclass(frozen=True, slots=True)
class Strip:
    """A column range of a table, as non-empty rectangles from top to bottom that cover all rows."""

    col_start: int
    col_stop: int
    rects: tuple[Rect, ...]

    @property
    def cols(self) -> int:
        """Width."""
        return self.col_stop - self.col_start

    @property
    def edges(self) -> tuple[int, ...]:
        """The row numbers of the strip's cuts, from 0 to the table's rows: ``(0, rows)`` without cuts."""
        return (0, *(rect.row_stop for rect in self.rects))


def tile(
    table: str,
    rows: int,
    cols: int,
    rects: Sequence[Rect],
    *,
    world_size: int | None = None,
    column_unit: int = 1,
    replicated: bool = False,
) -> tuple[Strip, ...]:
    """The strips, from left to right, that ``rects`` make of a table.

    Args:
        table: the table's name, for messages.
        rows, cols: the table's size.
        rects: the rectangles in any order. Rectangles without rows are left out of the strips.
        world_size: number of ranks; None: not checked.
        column_unit: strips begin at multiples of it.
        replicated: each rectangle is the whole table, on a different rank; the result is one strip, of the first
            rectangle.

    Raises:
        TilingError: names the table, the first rectangle that is wrong, and what was expected.
    """
    for rect in rects:
        if rect.rank < 0 or (world_size is not None and rect.rank >= world_size):
            most = "" if world_size is None else f" and below {world_size}"
            _fail(table, rect, f"is on rank {rect.rank}; expected a rank of at least 0{most}")
        inside = 0 <= rect.row_start <= rect.row_stop <= rows and 0 <= rect.col_start < rect.col_stop <= cols
        if not inside or (replicated and (rect.rows, rect.cols) != (rows, cols)):
            _fail(table, rect, f"expected {'all' if replicated else 'a part'} of its {rows} rows and {cols} columns")
    if replicated:
        return (_one_replica(table, rects),)
    filled = sorted((rect for rect in rects if rect.rows), key=attrgetter("col_start", "row_start"))
    strips: list[Strip] = []
    at = 0
    for _, column in groupby(filled, attrgetter("col_start")):
        strips.append(_strip(table, rows, at, tuple(column)))
        at = strips[-1].col_stop
        if strips[-1].col_start % column_unit:
            _fail(table, strips[-1].rects[0], f"expected a first column that is a multiple of {column_unit}")
    if at != cols:
        raise TilingError(f"table {table!r}: no shard holds columns {at} to {cols} of its {rows} x {cols}")
    return tuple(strips)


def _strip(table: str, rows: int, col: int, column: tuple[Rect, ...]) -> Strip:
    """The strip that begins at ``col``, of rectangles that begin at one column, from top to bottom."""
    row, col_stop = 0, column[0].col_stop
    for rect in column:
        if (rect.row_start, rect.col_start) != (row, col):
            _fail(table, rect, f"expected the next to begin at row {row}, column {col}")
        if rect.col_stop != col_stop:
            _fail(table, rect, f"expected columns up to {col_stop}, like the rows above it")
        row = rect.row_stop
    if row != rows:
        _fail(table, column[-1], f"no shard holds rows {row} to {rows} of its columns")
    return Strip(col, col_stop, column)


def _one_replica(table: str, rects: Sequence[Rect]) -> Strip:
    ranks = [rect.rank for rect in rects]
    if not rects or len(set(ranks)) != len(ranks):
        raise TilingError(f"table {table!r} has replicas on ranks {ranks}; expected at least one, and one per rank")
    return Strip(rects[0].col_start, rects[0].col_stop, (rects[0],))


def _fail(table: str, rect: Rect, expected: str) -> NoReturn:
    raise TilingError(f"table {table!r}, shard {rect.text}: {expected}")
