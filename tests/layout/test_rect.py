"""Tilings against counting every cell, and the errors of invalid ones."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect, Strip, TilingError, tile

MOST = 6  # rows and columns of the tables that are counted


@st.composite
def edges(draw: st.DrawFn, size: int) -> list[int]:
    """Where ``size`` is cut: from 0 to it, now and then twice at one place."""
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return [0, *sorted(inner), size]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, int, list[Rect]]:
    """(rows, columns, rectangles of strips in any order): what every sharding makes; rows may be cut to nothing."""
    rows, cols = draw(st.integers(1, MOST)), draw(st.integers(1, MOST))
    rects = []
    for left, right in pairwise(sorted(set(draw(edges(cols))))):
        for top, bottom in pairwise(draw(edges(rows))):
            rects.append(Rect(draw(st.integers(0, 2)), top, bottom, left, right, "t"))
    return rows, cols, draw(st.permutations(rects))


anything = st.lists(st.builds(Rect, *[st.integers(-1, MOST + 1)] * 5), max_size=6)


def is_tiling(rows: int, cols: int, rects: list[Rect]) -> bool:
    """By counting: sound numbers, each cell in one rectangle, and rectangles that share columns share all of them."""
    held = [0] * (rows * cols)
    for r in rects:
        if r.rank < 0 or not (0 <= r.row_start <= r.row_stop <= rows and 0 <= r.col_start < r.col_stop <= cols):
            return False
        for row in range(r.row_start, r.row_stop):
            for col in range(r.col_start, r.col_stop):
                held[row * cols + col] += 1
    columns = [set(range(r.col_start, r.col_stop)) for r in rects if r.rows]
    return set(held) == {1} and all(a == b or not a & b for a in columns for b in columns)


@given(tilings())
def test_strips_are_what_was_cut(cut: tuple[int, int, list[Rect]]) -> None:
    rows, cols, rects = cut
    strips = tile("t", rows, cols, rects)
    assert [s.col_start for s in strips] == [0, *(s.col_stop for s in strips)][:-1]
    assert sum(s.cols for s in strips) == cols
    for strip in strips:
        assert strip.edges[0] == 0 and strip.edges[-1] == rows
        assert [(r.row_start, r.row_stop) for r in strip.rects] == list(pairwise(strip.edges))
    found = [r for s in strips for r in s.rects]
    assert sorted(found) == sorted(r for r in rects if r.rows)
    assert found == sorted(found, key=lambda r: (r.col_start, r.row_start))


@given(tilings(), st.integers(0, 1 << 30), st.booleans())
def test_a_tiling_with_one_change_passes_if_and_only_if_counting_says_so(
    cut: tuple[int, int, list[Rect]], seed: int, drop: bool
) -> None:
    rows, cols, rects = cut
    chance = random.Random(seed)
    which = chance.randrange(len(rects))
    numbers = [getattr(rects[which], name) for name in Rect.__slots__]
    numbers[chance.randrange(5)] += chance.choice([-1, 1])
    rects[which : which + 1] = [] if drop else [Rect(*numbers)]
    check(rows, cols, rects)


@given(st.integers(1, MOST), st.integers(1, MOST), anything)
def test_anything_passes_if_and_only_if_counting_says_so(rows: int, cols: int, rects: list[Rect]) -> None:
    check(rows, cols, rects)


def check(rows: int, cols: int, rects: list[Rect]) -> None:
    """``tile`` and counting agree."""
    if is_tiling(rows, cols, rects):
        tile("t", rows, cols, rects)
    else:
        with pytest.raises(TilingError, match="table 't'"):
            tile("t", rows, cols, rects)


@pytest.mark.parametrize(
    ("rects", "said"),
    [
        ([], "no shard holds columns 0 to 8 of its 10 x 8"),
        ([Rect(0, 0, 5, 0, 8, "t")], r"t\[0:5, 0:8\]@0: no shard holds rows 5 to 10"),
        (
            [Rect(0, 0, 5, 0, 8), Rect(1, 6, 10, 0, 8)],
            r"\[6:10, 0:8\]@1: expected the next to begin at row 5, column 0",
        ),
        (
            [Rect(0, 0, 6, 0, 8), Rect(1, 5, 10, 0, 8)],
            r"\[5:10, 0:8\]@1: expected the next to begin at row 6, column 0",
        ),
        ([Rect(0, 0, 10, 0, 4)], "no shard holds columns 4 to 8"),
        ([Rect(0, 0, 10, 0, 4), Rect(0, 0, 10, 5, 8)], "expected the next to begin at row 0, column 4"),
        ([Rect(0, 0, 5, 0, 8), Rect(0, 5, 10, 0, 4)], "expected columns up to 8, like the rows above it"),
        ([Rect(0, 0, 11, 0, 8)], "expected a part of its 10 rows and 8 columns"),
        ([Rect(0, 0, 10, 0, 0)], "expected a part of its 10 rows and 8 columns"),
        ([Rect(-1, 0, 10, 0, 8)], "is on rank -1; expected a rank of at least 0$"),
        ([Rect(2, 0, 10, 0, 8)], "is on rank 2; expected a rank of at least 0 and below 2"),
        ([Rect(0, 0, 10, 0, 6), Rect(1, 0, 10, 6, 8)], "expected a first column that is a multiple of 4"),
    ],
)
def test_error_messages(rects: list[Rect], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tile("t", 10, 8, rects, world_size=2 if "below" in said else None, column_unit=4)


def test_columns_end_where_the_table_does_whatever_the_unit() -> None:
    cut = [Rect(0, 0, 3, 0, 8), Rect(0, 0, 3, 8, 10)]
    assert [s.col_stop for s in tile("t", 3, 10, cut, column_unit=4)] == [8, 10]


def test_replicas_are_the_whole_table_once_a_rank() -> None:
    assert tile("t", 3, 8, [Rect(1, 0, 3, 0, 8), Rect(0, 0, 3, 0, 8)], replicated=True) == (
        Strip(0, 8, (Rect(1, 0, 3, 0, 8),)),
    )
    for rects, said in (
        ([Rect(0, 0, 3, 0, 4), Rect(0, 0, 3, 4, 8)], "expected all of its 3 rows and 8 columns"),
        ([Rect(1, 0, 3, 0, 8), Rect(1, 0, 3, 0, 8)], r"replicas on ranks \[1, 1\]"),
        ([], "expected at least one"),
    ):
        with pytest.raises(TilingError, match=said):
            tile("t", 3, 8, rects, replicated=True)


@given(*[st.builds(Rect, st.integers(0, 2), *[st.integers(0, MOST)] * 4)] * 2)
def test_an_overlap_is_the_cells_of_both(one: Rect, other: Rect) -> None:
    def cells(rect: Rect | None) -> set[tuple[int, int]]:
        if rect is None:
            return set()
        return {(r, c) for r in range(rect.row_start, rect.row_stop) for c in range(rect.col_start, rect.col_stop)}

    both = one.overlap(other)
    assert cells(both) == cells(one) & cells(other)
    assert both is None or (both.rank == one.rank and both.rows and both.cols)


def test_rectangles_of_two_tables_have_nothing_in_common() -> None:
    assert Rect(0, 0, 3, 0, 8, "a").overlap(Rect(0, 0, 3, 0, 8, "b")) is None
    assert Rect(3, 0, 10, 0, 64, "a").text == "a[0:10, 0:64]@3"
