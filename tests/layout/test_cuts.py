"""Cuts: even rows, rows in proportion, column pieces, and the grid of both."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recinfer.errors import ConfigError
from recinfer.layout.cuts import column_width, even_rows, grid, heights_in_proportion
from recinfer.layout.rect import tile


@given(st.integers(1, 1 << 40), st.integers(1, 70))
def test_even_rows_follow_one_another_and_differ_in_the_last_ones_alone(rows: int, parts: int) -> None:
    start, height = even_rows(rows, parts, np.arange(parts))
    assert height.sum() == rows
    assert (start == np.cumsum(height) - height).all()
    full = -(-rows // parts)
    assert (height[: rows // full] == full).all() and (height[rows // full + 1 :] == 0).all()


@given(st.integers(1, 1 << 40), st.lists(st.integers(0, 1 << 43), min_size=1, max_size=70).filter(any))
def test_heights_in_proportion_are_within_a_row_of_their_share(rows: int, weights: list[int]) -> None:
    heights = heights_in_proportion(rows, weights)
    assert sum(heights) == rows
    assert all(abs(h - Fraction(rows * w, sum(weights))) < 1 for h, w in zip(heights, weights))
    assert all(h == 0 for h, w in zip(heights, weights) if not w)


def test_heights_in_proportion_to_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[0, 0\] sum to 0"):
        heights_in_proportion(10, [0, 0])


@given(st.integers(1, 3000), st.integers(1, 300))
def test_column_widths_divide(cols: int, least: int) -> None:
    width = column_width(cols, least)
    fitting = [w for w in range(4, cols, 4) if w >= least and not cols % w]
    assert width == (fitting[0] if fitting else cols)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.lists(st.integers(1, 5), min_size=1, max_size=4)
)
def test_a_grid_tiles(heights: list[int], widths: list[int]) -> None:
    ranks = list(range(len(heights) * len(widths)))
    rects = grid(heights, widths, ranks)
    strips = tile("t", sum(heights), sum(widths), rects)
    assert [s.cols for s in strips] == widths
    assert [r.rank for r in rects] == ranks
    assert [r.rows for r in rects] == heights * len(widths)
