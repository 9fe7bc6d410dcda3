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
