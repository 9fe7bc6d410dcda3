"""The recorder of stalls with a real process, and what the simulation makes of what it recorded."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from recinfer.errors import ConfigError
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.simulate import Deployment, simulate
from recinfer.sizing.stalls import Stall, StallRecorder, can_record, looks_between, pace_of, slowness_of, stalls_of
from recinfer.sizing.workload import shards_of
from tests.sizing.models import COSTS, model_of


def test_a_core_that_somebody_else_keeps_is_seen() -> None:
    if not can_record():
        pytest.skip("this system gives no thread precedence before all others")
    before = set(multiprocessing.active_children())  # of other tests
    cores = sorted(os.sched_getaffinity(0))

    def seen() -> tuple[float, float]:
        """Seconds for which a core was kept, and those of them that were recorded."""
        kept: list[float] = []

        def keep_a_core() -> None:
            os.sched_setaffinity(0, {cores[-1]})  # of this thread
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
            kept.append(time.perf_counter())
            while time.perf_counter() < kept[0] + 0.02:
                pass
            kept.append(time.perf_counter())

        with StallRecorder() as recorder:
            thread = threading.Thread(target=keep_a_core)
            thread.start()
            thread.join()
        assert recorder.cores == len(cores) == len(recorder.looks) == len(recorder.pids)
        assert recorder.seconds >= kept[1] - kept[0]
        begins = [stall.begin for stall in recorder.stalls]
        assert begins == sorted(begins)
        mine = [s for s in recorder.stalls if s.core == len(cores) - 1 and s.lost == 1]
        both = (max(min(s.begin + s.seconds, kept[1]) - max(s.begin, kept[0]), 0.0) for s in mine)
        return kept[1] - kept[0], sum(both)

    # All of it but some milliseconds. Who wants this process's interpreter meanwhile, or the hypervisor, takes the core from
    # who keeps it: then once more.
    until = time.monotonic() + 60
    while True:
        whole, found = seen()
        if found > 0.5 * whole:
            break
        assert time.monotonic() < until, (found, whole)
    assert set(multiprocessing.active_children()) <= before


def test_recorded_stalls_hold_up_who_comes_meanwhile_and_nobody_else() -> None:
    model = model_of()
    trace = poisson(50.0, 200, ids_per_sample=model.ids_per_sample, seed=3)
    deployment, plan = Deployment(1, 1, 0, cores=2, co_located=True), shards_of(model, 1)
    begin = float(trace.times[100]) - 1e-3
    calm, stalled, half = (
        simulate(deployment, trace, model, plan, COSTS, stalls=stalls)
        for stalls in ([], [Stall(core, begin, 0.05) for core in (0, 1)], [Stall(1, begin, 0.05)])
    )
    late = np.flatnonzero(stalled.latencies > calm.latencies + 1e-3)
    assert 100 in late
    assert ((trace.times[late] > begin - 0.01) & (trace.times[late] < begin + 0.06)).all()
    assert stalled.latencies[100] == pytest.approx(calm.latencies[100] + 0.049, abs=0.01)
    assert half.latencies.sum() < stalled.latencies.sum()
    before = simulate(deployment, trace, model, plan, COSTS, stalls=[Stall(0, -1.0, 0.5)])
    assert (before.latencies == calm.latencies).all()


def test_a_core_that_needs_longer_for_the_same_is_slow() -> None:
    looks = [(0.004 * i, 1e-4, 2e-5, 1e-4) for i in range(100)]
    looks[20] = (0.08, 5e-3, 2e-5, 1e-4)  # late once
    looks[30] = (0.12, 1e-4, 2e-4, 9e-4)  # and once it took longer, which is no phase
    looks[50:60] = [(0.004 * i, 1e-4, 4e-5, 2e-4) for i in range(50, 60)]
    late, slow = stalls_of(1, looks)
    assert (late.core, late.lost) == (1, 1.0)
    assert late.begin == pytest.approx(0.078)
    assert late.seconds == pytest.approx(0.007)
    assert slow.core == 1
    assert slow.begin == pytest.approx(0.198)
    assert slow.seconds == pytest.approx(0.04)
    assert slow.lost == pytest.approx(1 - 1.1 / 2, abs=0.01)  # beside the mean, of which it is a part
    assert stalls_of(0, looks[:2]) == []


def test_the_pace_is_what_both_takes_of_the_small_work_are_on_average() -> None:
    looks = [(0.004 * i, 1e-4, 2e-5, 1e-4) for i in range(100)]
    looks[50:60] = [(0.004 * i, 1e-4, 4e-5, 1.2e-4) for i in range(50, 60)]
    assert pace_of(looks) == pytest.approx(0.9 * 1.2e-4 + 0.1 * 1.6e-4)
    looks[30] = (0.12, 1e-4, 2e-5, 5e-3)  # broken off: as if it had taken twice the usual
    assert pace_of(looks) == pytest.approx(0.89 * 1.2e-4 + 0.1 * 1.6e-4 + 0.01 * 2.4e-4)
    assert pace_of(looks[:2]) == 0.0
    assert looks_between(looks, 0.2, 0.24) == looks[50:60]
    assert looks_between(looks, 0.5, 1.0) == []


def test_a_core_is_as_slow_as_each_look_at_it_says() -> None:
    calm = [(0.004 * i, 1e-4, 2e-5, 1e-4) for i in range(100)]
    shared = [
        (due, late, second * (1.5 if 20 <= i < 40 else 1.0), first) for i, (due, late, second, first) in enumerate(calm)
    ]
    shared[60] = (0.24, 3e-3, 9e-4, 1e-4)  # late, and broken off
    found, slower = slowness_of([calm, shared])
    (still,) = [stall for stall in found if stall.lost == 1]
    assert (still.core, still.begin, still.seconds) == (1, pytest.approx(0.238), pytest.approx(5e-3))
    slow = [stall for stall in found if stall.lost < 1]
    assert {stall.core for stall in slow} == {1}
    assert [stall.begin for stall in slow] == pytest.approx([0.004 * i - 0.002 for i in (*range(20, 40), 60)])
    assert [stall.seconds for stall in slow] == pytest.approx([0.004] * 21)
    assert [stall.lost for stall in slow] == pytest.approx([1 / 3] * 20 + [1 / 2])
    assert slower == pytest.approx((179 + 20 * 1.5 + 2) / 200)
    assert slowness_of([[], []]) == ([], 1.0)


def test_a_machine_whose_halves_come_and_go_is_as_fast_on_average_and_less_even() -> None:
    """Played back with the speed that goes with it, slow moments make latencies vary more, and lone ones no longer on average."""
    model = model_of()
    trace = poisson(50.0, 2000, ids_per_sample=model.ids_per_sample, seed=3)
    deployment, plan = Deployment(1, 1, 0, cores=2, co_located=True), shards_of(model, 1)
    random = np.random.default_rng(3)
    state = np.repeat(random.random((2, 600)) < 0.5, 20, axis=1)  # for 80 ms
    looks = [[(0.004 * i, 1e-4, 3e-5 if slow else 2e-5, 1e-4) for i, slow in enumerate(its)] for its in state]
    stalls, slower = slowness_of(looks)
    assert slower == pytest.approx(1.25, rel=0.05)
    even = simulate(deployment, trace, model, plan, COSTS, stalls=[])
    uneven = simulate(deployment, trace, model, plan, COSTS, stalls=stalls, speed=slower)
    assert np.mean(uneven.latencies) == pytest.approx(np.mean(even.latencies), rel=0.1)
    assert np.std(uneven.latencies) > 1.2 * np.std(even.latencies)


def test_a_slow_core_takes_longer_for_all_that_comes_meanwhile() -> None:
    model = model_of()
    trace = poisson(50.0, 200, ids_per_sample=model.ids_per_sample, seed=3)
    deployment, plan = Deployment(1, 1, 0, cores=2, co_located=True), shards_of(model, 1)
    begin, end = float(trace.times[50]), float(trace.times[150])
    slow = [Stall(core, begin, end - begin, 0.5) for core in (0, 1)]
    calm, slowed = (simulate(deployment, trace, model, plan, COSTS, stalls=stalls) for stalls in ([], slow))
    ratio = slowed.latencies / calm.latencies
    assert np.median(ratio[52:148]) == pytest.approx(2.0, rel=0.15)
    assert (ratio[:49] == 1.0).all()


def test_stalls_of_other_machines_are_refused() -> None:
    model = model_of()
    trace, plan = poisson(50.0, 20, ids_per_sample=8, seed=3), shards_of(model, 1)
    with pytest.raises(ConfigError, match="co-located"):
        simulate(Deployment(1, 1, 0, cores=2), trace, model, plan, COSTS, stalls=[])
    with pytest.raises(ConfigError, match="core 2, expected 0 to 1"):
        simulate(Deployment(1, 1, 0, 2, co_located=True), trace, model, plan, COSTS, stalls=[Stall(2, 0.0, 1.0)])
