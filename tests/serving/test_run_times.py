"""What is expected of runs, and that no bad moment keeps them small."""

from __future__ import annotations

import pytest

from recinfer.serving.engine.run_times import LONGEST_RUN_S, SMOOTHING, RunTimes

SHORT, LONG = 0.8 * LONGEST_RUN_S, 2 * LONGEST_RUN_S


def test_sizes_are_told_apart_by_powers_of_two_and_more_samples_take_as_much_more():
    times = RunTimes()
    assert times.expected("a", 1) == 0 and times.may_share("a", 1000)
    times.learn("a", 5, 0.005)
    assert [times.expected("a", samples) for samples in (3, 4, 7, 8)] == pytest.approx([0, 0.004, 0.007, 0.008])
    times.learn("a", 8, 0.004)
    assert [times.expected("a", samples) for samples in (7, 8, 1000)] == pytest.approx([0.007, 0.004, 0.5])
    assert times.expected("b", 5) == 0


def test_a_run_is_no_longer_than_allowed_because_a_smaller_one_of_its_size_was_short():
    times = RunTimes()
    times.learn("a", 16, 0.9 * LONGEST_RUN_S)
    assert times.may_share("a", 17) and not times.may_share("a", 31)


def test_a_shorter_time_is_believed_at_once_and_a_longer_one_by_and_by():
    times = RunTimes()
    for seconds, expected in [(0.01, 0.01), (0.002, 0.002), (0.012, 0.002 + SMOOTHING * 0.01)]:
        times.learn("a", 1, seconds)
        assert times.expected("a", 1) == pytest.approx(expected)


def test_a_size_that_took_too_long_once_is_tried_again():
    times = RunTimes()
    times.learn("a", 1, SHORT / 10)
    times.learn("a", 4, LONG)
    assert times.may_share("a", 3) and not times.may_share("a", 4) and not times.may_share("a", 100)
    for _ in range(17):
        assert not times.may_share("a", 4)
        times.learn("a", 3, SHORT)
    assert times.may_share("a", 4)
    times.learn("a", 4, SHORT)
    assert times.may_share("a", 4) and not times.may_share("a", 6)


def test_one_that_takes_too_long_stays_forbidden_but_for_a_try_now_and_then():
    times = RunTimes()
    allowed = 0
    for _ in range(200):
        samples = 4 if times.may_share("a", 4) else 3
        allowed += samples == 4
        times.learn("a", samples, LONG if samples == 4 else SHORT)
    assert 5 <= allowed <= 15


def test_where_one_request_takes_long_two_may_take_as_long_as_two():
    times = RunTimes()
    times.learn("a", 1, 3 * LONGEST_RUN_S)
    assert times.may_share("a", 2)
    times.learn("a", 2, 4 * LONGEST_RUN_S)
    assert times.may_share("a", 2) and times.may_share("a", 3)
    times.learn("a", 4, 7 * LONGEST_RUN_S)
    assert not times.may_share("a", 4)


def test_lanes_that_are_gone_are_forgotten():
    times = RunTimes()
    for lane in range(5000):
        times.learn(lane, 1, 0.001)
    assert len(times._rates) <= 1025 and len(times._learned) <= 1025
