"""Matrices of cases: a day's run has every pair of values, a night's every combination."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["by_pairs"]


def by_pairs(*axes: Sequence[Any], step: int = 0) -> list[Any]:
    """The cases of a parametrized test with an argument for each of three axes.

    A case is nightly unless the positions of its values sum to a multiple of the shortest axis's length. So each pair of values of two
    axes comes with one value or more of the third in the other cases.

    Args:
        step: instead of the shortest axis's length, the length of another: pairs of values of the other two axes are then by day only
            where the third has a value for them.
    """
    assert len(axes) == 3, f"pairs are covered with 3 axes, not {len(axes)}"
    step = step or min(map(len, axes))
    cases = []
    for positions in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[position] for axis, position in zip(axes, positions)]
        name = "-".join(str(getattr(value, "value", value)) for value in values)
        marks = [pytest.mark.nightly] if sum(positions) % step else []
        cases.append(pytest.param(*values, id=name, marks=marks))
    return cases
