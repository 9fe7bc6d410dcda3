"""What is drawn only as far as somebody looks is what would have been drawn in advance, and costs nothing where nobody looks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recinfer.sizing.arrivals import poisson
from recinfer.sizing.clock import Clock, Cpu, Thread
from recinfer.sizing.disturbances import Comings, Stalls, held_up
from recinfer.sizing.simulate import Deployment, simulate
from recinfer.sizing.typical import TYPICAL_COSTS
from recinfer.sizing.workload import shards_of
from tests.sizing.models import model_of

KINDS = [(2e-3, 1.0), (30e-3, 0.4), (0.2e-3, 1.0), (4e-3, 0.7)]


def comings(seed: int, per_s: float = 20.0, kinds: list[tuple[float, float]] = KINDS) -> Comings:
    return Comings(np.random.default_rng(seed), per_s, kinds)


@pytest.mark.parametrize("seed", range(4))
def test_stalls_that_are_drawn_are_those_that_are_told(seed: int) -> None:
    drawn, same, until = Stalls(comings(seed)), comings(seed), 20.0
    parts: list[tuple[float, float]] = []
    while same.due <= until:
        parts += held_up(same.due, same.seconds, same.lost)
        same.take()
    told = Stalls()
    parts.sort()
    for now in np.sort(np.random.default_rng(9).random(3000) * until).tolist():
        while parts and parts[0][0] <= now:
            told.begin(*parts.pop(0))
        assert drawn.until(now) == pytest.approx(told.until(now), abs=1e-9)
    assert told.until(until) > 1.0


def test_what_nobody_looked_at_is_passed_over() -> None:
    mine, passed, times = comings(1), 0.0, 2000
    mean_s = sum(seconds for seconds, _ in KINDS) / len(KINDS)
    found = []
    for look in range(1, times):
        now = look * 1000.0
        passed += mine.skip(now)
        before = 0
        while mine.due <= now:
            mine.take()
            before += 1
        found.append(before)
    assert passed == pytest.approx(1000.0 * times * 20.0 * mean_s, rel=0.01)
    assert np.mean(found) == pytest.approx(20.0, rel=0.1)  # those of the last second
    assert math.isinf(comings(1, per_s=0.0).due) and math.isinf(comings(1, kinds=[]).due)


def test_a_core_is_wanted_as_often_whether_somebody_has_it_or_not() -> None:
    """Visits take their share of a core that has nothing to do most of the time, and of one that is never without."""
    kinds, per_s, until = [(1e-3, 1.0), (3e-3, 1.0)], 50.0, 200.0
    for work_s, share in ((0.2e-3, 0.1), (9.5e-3, 0.1)):
        clock = Clock()
        cpu = Cpu(clock, 1)
        cpu.disturb(0, comings(1, 0.0), comings(2, per_s, kinds))
        thread, ends = Thread(cpu), []

        def come(number: int) -> None:
            thread.submit(work_s, 0.0, lambda: ends.append(clock.now))  # noqa: B023
            if number * 10e-3 < until:
                clock.after(10e-3, come, number + 1)  # noqa: B023

        clock.at(0.0, come, 1)
        clock.run()
        assert cpu.busy - thread.spent == pytest.approx(share * clock.now, rel=0.08)
        assert clock.now < until * (1.0 + work_s / 10e-3)


def test_a_visit_that_began_before_is_waited_for() -> None:
    """A core that is somebody else's for half of the time: so many that come find it taken, and wait as in M/D/1."""
    clock = Clock()
    cpu = Cpu(clock, 1)
    cpu.disturb(0, comings(1, 0.0), comings(3, 250.0, [(2e-3, 1.0)]))
    late = []

    def come(begin: float) -> None:
        Thread(cpu).submit(1e-6, 0.0, lambda: late.append(clock.now - begin))

    times = np.random.default_rng(4).random(4000) * 4000.0
    for begin in times.tolist():
        clock.at(begin, come, begin)
    clock.run()
    assert np.mean(np.array(late) > 2e-6) == pytest.approx(0.5, abs=0.03)
    assert np.mean(late) == pytest.approx(0.5 * 2e-3 / (2 * (1 - 0.5)), rel=0.1)  # Pollaczek-Khinchine


def test_seconds_in_which_nothing_comes_cost_no_events() -> None:
    model, deployment = model_of(), Deployment(1, 2, 0, 4, 3)
    shards = shards_of(model, 1)

    def events(qps: float) -> int:
        return simulate(deployment, poisson(qps, 300, ids_per_sample=8), model, shards, TYPICAL_COSTS).events

    often, seldom = events(50.0), events(0.01)
    assert seldom < 1.2 * often
