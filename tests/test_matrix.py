"""A day's cases of a matrix have every pair of values, and the night's are the others."""

import itertools

from tests.matrix import by_pairs


def test_every_pair_comes_by_day() -> None:
    axes = ["abc", "uvwxyz", [1, 2]]
    cases = by_pairs(*axes)
    assert len(cases) == 36
    day = [case.values for case in cases if not case.marks]
    assert len(day) == 18
    for one, two in itertools.combinations(range(3), 2):
        assert {(case[one], case[two]) for case in day} == set(itertools.product(axes[one], axes[two]))


def test_with_a_step_of_three_the_axis_of_two_comes_with_every_value() -> None:
    axes = ["abc", "uvwxyz", [1, 2]]
    day = [case.values for case in by_pairs(*axes, step=3) if not case.marks]
    assert len(day) == 12
    for one in (0, 1):
        assert {(case[one], case[2]) for case in day} == set(itertools.product(axes[one], axes[2]))
