"""Simulated processors and threads against queueing theory: mean times of M/M/1, M/D/1 and M/M/c, stalls and turns."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from recinfer.sizing.clock import Clock, Cpu, Thread, at_sleep
from recinfer.sizing.lock import SWITCH_S, Lock

JOBS, WARM_UP = 60_000, 5_000
TOLERANCE = 0.08  # of a mean wait over 55,000 dependent jobs at these loads; seeds are fixed


def mean_time(
    start: Callable[[Clock], Callable[[float, Callable[[], None]], None]], work: np.ndarray, rate: float
) -> float:
    """Mean seconds from arrival to end of Poisson jobs of ``work`` seconds each."""
    clock = Clock()
    begin = start(clock)
    times = np.cumsum(np.random.default_rng(7).exponential(1 / rate, work.size))
    took = np.zeros(work.size)

    def come(i: int) -> None:
        if i + 1 < work.size:
            clock.at(times[i + 1], come, i + 1)
        begin(work[i], lambda: took.__setitem__(i, clock.now - times[i]))

    clock.at(times[0], come, 0)
    clock.run()
    return float(took[WARM_UP:].mean())


def on_thread(clock: Clock) -> Callable[[float, Callable[[], None]], None]:
    thread = Thread(Cpu(clock, 1, slice_s=math.inf))
    return lambda seconds, over: thread.submit(seconds, 0.0, over)


def on_cores(cores: int, slice_s: float = math.inf) -> Callable[[Clock], Callable[[float, Callable[[], None]], None]]:
    def start(clock: Clock) -> Callable[[float, Callable[[], None]], None]:
        cpu = Cpu(clock, cores, slice_s=slice_s)
        return lambda seconds, over: cpu.start(seconds, over)

    return start


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_md1(load: float) -> None:
    expected = 1.0 + load / (2 * (1 - load))
    assert mean_time(on_thread, np.ones(JOBS), load) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_mm1(load: float) -> None:
    work = np.random.default_rng(1).exponential(1.0, JOBS)
    assert mean_time(on_thread, work, load) == pytest.approx(1 / (1 - load), rel=TOLERANCE)


@pytest.mark.parametrize(("cores", "load"), [(2, 0.6), (4, 0.8)])
def test_mmc(cores: int, load: float) -> None:
    work = np.random.default_rng(2).exponential(1.0, JOBS)
    offered = cores * load
    terms = [offered**k / math.factorial(k) for k in range(cores)]
    last = offered**cores / math.factorial(cores) / (1 - load)
    waits = last / (sum(terms) + last)
    expected = 1 + waits / (cores * (1 - load))
    assert mean_time(on_cores(cores), work, offered) == pytest.approx(expected, rel=TOLERANCE)


def test_short_slices_are_processor_sharing() -> None:
    """Jobs of two very different lengths: shared, a mean time is that of M/M/1 whatever the lengths' distribution."""
    random = np.random.default_rng(3)
    work = np.where(random.random(20_000) < 0.9, 0.2, 8.2)  # mean 1
    shared = mean_time(on_cores(1, slice_s=0.05), work, 0.6)
    in_turn = mean_time(on_cores(1), work, 0.6)
    assert shared == pytest.approx(1 / 0.4, rel=0.15)
    assert in_turn > 1.5 * shared


def test_two_jobs_run_at_once_on_two_cores_and_in_turns_on_one() -> None:
    ends: dict[int, list[float]] = {}
    for cores in (1, 2):
        clock = Clock()
        cpu = Cpu(clock, cores)
        for _ in range(2):
            cpu.start(0.01, lambda cores=cores, clock=clock: ends.setdefault(cores, []).append(clock.now))
        clock.run()
        assert cpu.busy == pytest.approx(0.02)
    assert ends[2] == pytest.approx([0.01, 0.01])
    assert ends[1][1] == pytest.approx(0.02)
    assert ends[1][0] > 0.015  # turns, not one after the other


def test_a_fast_host_takes_less_time() -> None:
    clock = Clock()
    ends: list[float] = []
    Cpu(clock, 1, speed=2.0).start(1.0, lambda: ends.append(clock.now))
    clock.run()
    assert ends == pytest.approx([0.5])


def test_a_stall_holds_up_what_runs_and_what_comes() -> None:
    clock = Clock()
    cpu = Cpu(clock, 2, slice_s=math.inf)
    ends: list[float] = []
    cpu.start(1.0, lambda: ends.append(clock.now))
    clock.at(0.5, cpu.stall, 0.25)
    clock.at(0.6, cpu.stall, 0.1)  # within the first one
    clock.at(0.6, lambda: cpu.start(0.1, lambda: ends.append(clock.now)))
    clock.at(1.1, cpu.stall, 1.0)
    clock.run()
    assert ends == pytest.approx([0.85, 2.25])
    assert cpu.busy == pytest.approx(1.1)


def test_a_sleeping_thread_costs_more_to_wake() -> None:
    clock = Clock()
    thread = Thread(Cpu(clock, 1))
    ends: list[float] = []
    for at in (0.0, 0.0005, 0.01):
        clock.at(at, lambda: thread.submit(0.001, 0.002, lambda: ends.append(clock.now)))
    clock.run()
    assert ends == pytest.approx([0.003, 0.004, 0.013])


def test_the_longer_a_thread_slept_the_more_it_costs_to_wake() -> None:
    clock = Clock()
    thread = Thread(Cpu(clock, 1), cooled=((0.01, 0.0005), (0.02, 0.002)))
    ends: list[float] = []
    for at in (0.0, 1.0, 1.01):
        clock.at(at, lambda: thread.submit(0.001, 0.001, lambda: ends.append(clock.now)))
    clock.run()
    assert ends[1] - 1.0 == pytest.approx(0.002 + 0.002)
    assert ends[2] - 1.01 == pytest.approx(0.002 + 0.0005 * (1.01 - ends[1]) / 0.01)
    assert thread.spent == pytest.approx(0.004 + 0.004 + ends[2] - 1.01)


def test_what_sleep_costs_is_on_lines_between_points_and_no_more_beyond_the_last() -> None:
    points = ((0.001, 1.0), (0.003, 2.0))
    found = [at_sleep(points, slept) for slept in (0.0, 0.0005, 0.001, 0.002, 0.003, 7.0, math.inf)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert at_sleep(points, 0.0005, 0.5) == pytest.approx(0.75)
    assert at_sleep((), 1.0) == 0.0


def test_a_thread_that_is_woken_runs_a_moment_later() -> None:
    clock = Clock()
    cpu = Cpu(clock, 2, wakes=((0.001, 0.0001), (0.002, 0.0003)))
    thread, ends = Thread(cpu), []
    for at in (0.0, 0.0012, 0.0028, 1.0):  # it sleeps for ever, 0.9 ms, 1.5 ms and long
        clock.at(at, lambda: thread.submit(0.0, 0.0, lambda: ends.append(clock.now)))
    clock.at(2.0, cpu.visit, 0.001, 0)  # others are not woken by us: it is known when they had the core
    clock.run()
    assert ends == pytest.approx([0.0003, 0.0013, 0.003, 1.0003])
    assert clock.now == pytest.approx(2.001)
    assert cpu.busy == pytest.approx(0.001), "a core that wakes up is not busy"


def test_who_waited_in_line_for_a_core_is_awake() -> None:
    clock = Clock()
    cpu, ends = Cpu(clock, 1, wakes=((0.001, 0.0001),)), []
    for _ in range(2):
        Thread(cpu).submit(0.001, 0.0, lambda: ends.append(clock.now))
    clock.run()
    assert ends == pytest.approx([0.0011, 0.0021])


def test_a_step_of_a_loop_goes_behind_what_waits_for_it() -> None:
    clock = Clock()
    thread = Thread(Cpu(clock, 1))
    order: list[str] = []

    def first() -> None:
        order.append("first")
        thread.steps(2, order.append, "first, two steps later")
        thread.next(0.001, order.append, "first's own")

    clock.at(0.0, thread.submit, 0.001, 0.0, first)
    for name in ("second", "third"):
        clock.at(0.0, thread.submit, 0.001, 0.0, order.append, name)
    clock.at(0.0025, thread.submit, 0.001, 0.0, order.append, "came between")
    clock.run()
    assert order == ["first", "first's own", "second", "third", "came between", "first, two steps later"]
    assert clock.now == pytest.approx(0.005)


def test_a_core_stands_still_by_itself() -> None:
    clock = Clock()
    cpu = Cpu(clock, 2)
    ends: dict[str, float] = {}
    for name in ("first", "second"):
        cpu.start(1.0, lambda name=name: ends.setdefault(name, clock.now))
    clock.at(0.5, cpu.stall, 0.25, 1)
    clock.run()
    assert sorted(ends.values()) == pytest.approx([1.0, 1.25])


def test_threads_of_one_interpreter_run_one_at_a_time() -> None:
    clock = Clock()
    cpu, lock, ends = Cpu(clock, 4), Lock(), {}
    for name, of in (("first", lock), ("second", lock), ("other's", Lock()), ("no Python", None)):
        thread = Thread(cpu, lock=of)
        thread.submit(5e-5, 0.0, lambda name=name: ends.setdefault(name, clock.now))
    clock.run()
    assert ends == pytest.approx({"first": 5e-5, "second": 1e-4, "other's": 5e-5, "no Python": 5e-5})


def test_a_long_job_gives_the_lock_up_each_switch_interval() -> None:
    clock = Clock()
    cpu, lock, ends = Cpu(clock, 2), Lock(), {}
    long, short = Thread(cpu, lock=lock), Thread(cpu, lock=lock)
    long.submit(10 * SWITCH_S, 0.0, lambda: ends.setdefault("long", clock.now))
    clock.at(0.5 * SWITCH_S, lambda: short.submit(0.5 * SWITCH_S, 0.0, lambda: ends.setdefault("short", clock.now)))
    clock.run()
    assert ends == pytest.approx({"short": 1.5 * SWITCH_S, "long": 10.5 * SWITCH_S})


def test_who_waits_for_the_lock_needs_no_core() -> None:
    clock = Clock()
    cpu, lock, ends = Cpu(clock, 2), Lock(), {}
    for name, of in (("first", lock), ("second", lock), ("other's", None)):
        Thread(cpu, lock=of).submit(5e-5, 0.0, lambda name=name: ends.setdefault(name, clock.now))
    clock.run()
    assert ends["other's"] == pytest.approx(5e-5)
    assert cpu.busy == pytest.approx(1.5e-4)


def test_what_a_job_continues_with_goes_first() -> None:
    clock = Clock()
    thread = Thread(Cpu(clock, 1))
    said: list[str] = []

    def first() -> None:
        said.append("first")
        thread.next(0.001, said.append, "continued")

    thread.submit(0.001, 0.0, first)
    thread.submit(0.001, 0.0, said.append, "second")
    clock.run()
    assert said == ["first", "continued", "second"]
    assert thread.idle
