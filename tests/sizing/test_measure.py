"""Measuring for real: servers start, answer and end, and what is found is sane; a short, noisy run."""

from __future__ import annotations

import math
import multiprocessing
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recinfer.inference.predictor import load
from recinfer.sizing import measure, probe
from recinfer.sizing.clock import at_sleep
from recinfer.sizing.costs import EndCosts, RunCosts
from recinfer.sizing.fit import _cold, _fit_remote, _of_two_wakes, _on_time, fit_serving
from recinfer.sizing.loads import at_one_pace
from recinfer.sizing.measure import measure_serving
from recinfer.sizing.probe import Load, ServerProcess, Spent, closed_loop, open_loop
from recinfer.sizing.sample import LOOKUP, lookup_requests, write_sample_archive
from recinfer.sizing.stalls import can_record
from tests.warm import warm_context


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are forked from a process that has imported torch; what they do for their calls is the same."""
    warm_context()
    monkeypatch.setattr(probe, "_START", "forkserver")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_archive(tmp_path_factory.mktemp("measure"), tables=((500, 8),) * 4)


def test_a_server_under_both_kinds_of_load(archive: Path) -> None:
    requests = lookup_requests(load(archive), 2, count=8)
    due = np.linspace(0.0, 0.3, 60)
    before = set(multiprocessing.active_children())  # of other tests
    with ServerProcess(archive) as server:
        seconds, closed = 0.3, closed_loop(server, LOOKUP, requests, 4, 0.3)
        while closed.answered <= 10 and seconds < 60:  # on a machine that stood still
            seconds *= 4
            closed = closed_loop(server, LOOKUP, requests, 4, seconds)
        opened = open_loop(server, LOOKUP, requests, due.tolist())
    assert closed.answered == closed.latencies.size > 10
    assert opened.answered == 60
    assert (np.diff(opened.arrivals) >= 0).all()
    assert (opened.arrivals >= due - 1e-6).all()
    for load_ in (closed, opened):
        assert load_.server.grpc > 0
        assert load_.client.loop > 0
        assert 0 < load_.runs <= load_.answered
        assert load_.handled > 0
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TURNS", 2)
    said: list[tuple[str, int, int]] = []
    before = set(multiprocessing.active_children())  # of other tests
    # What the figures are, other work on the machine decides as well: each is there, and a number.
    costs = measure_serving(seconds=0.1, progress=lambda *what: said.append(what))
    ends = (costs.server, costs.client, costs.run, costs.shard, costs.fan, costs.direct.server, costs.direct.run)
    figures = [figure for end in ends for figure in vars(end).values() if isinstance(figure, float)]
    assert len(figures) > 30 and all(0 <= figure < math.inf for figure in figures), costs
    told = costs.notes["measured"]
    # Past the queue, lookups are answered on the thread that takes gRPC's events; through it, the loop has its part.
    direct, queued = (told[f"{kind}, batch 1, 32 callers"] for kind in ("direct", "whole"))
    assert direct["loop"] < direct["grpc"] and direct["loop"] < queued["loop"]
    assert costs.server.grpc_s > 0
    assert any("ranker of 2" in name for name in told)
    texts, done, total = zip(*said)
    assert "calls, round 2 of 2" in texts and done[-1] + 1 == total[-1]
    if can_record():
        pace = costs.notes["pace_us"]
        assert 0 < pace["least"] <= pace["most"]
        assert {"whole", "single", "ranker of 1", "ranker of 2"} <= set(costs.paces)
        assert all(seconds > 0 for seconds in costs.paces.values())
    assert set(multiprocessing.active_children()) <= before


def test_turns_of_a_slow_minute_count_as_those_of_the_usual_pace() -> None:
    def turn(begin: float, slow: float) -> Load:
        spent = Spent(0.1 * slow, 0.2 * slow, 0.0, 0.0, 0.1 * slow, 0.01 * slow, 40.0)
        return Load(1.0, begin, np.arange(10) / 10, np.full(10, 1e-3 * slow), spent, spent, 10, 0.3 * slow)

    slow_in_turn = (1.0, 1.0, 1.5, 1.0, 0.8)
    turns = [turn(2.0 * i, slow) for i, slow in enumerate(slow_in_turn)]
    looks = [
        [(0.004 * i, 1e-4, 2e-5 * slow, 1e-4 * slow) for i in range(2500) for slow in (slow_in_turn[i // 500],)]
        for _ in range(2)
    ]
    steady, usual = at_one_pace(turns, looks)
    assert usual == pytest.approx(1.2e-4)
    for its in steady:
        assert its.server.grpc == pytest.approx(0.2) and its.client.waited == pytest.approx(0.01)
        assert its.latencies == pytest.approx(1e-3) and its.handled == pytest.approx(0.3)
        assert (its.server.turns, its.runs, its.answered) == (40.0, 10, 10)
    unseen, unknown = at_one_pace(turns, [[(100.0 + i, 1e-4, 2e-5, 1e-4) for i in range(10)]])
    assert [its.handled for its in unseen] == [its.handled for its in turns] and unknown == 0.0


def test_costs_are_found_where_no_requests_shared_a_run() -> None:
    def load_of(runs: float) -> SimpleNamespace:
        ends = ("loop", "grpc", "asks", "run", "io", "client_loop", "client_grpc", "client_io")
        times = dict.fromkeys((*ends, "ours", "all", "cycle", "latency", "usual", "wake"), 1e-4)
        return SimpleNamespace(**times, runs=runs, spread=(0.9, 1.1), stalls=(), seconds=1.0)

    loads: Any = defaultdict(lambda: load_of(1.0))  # a short or slow measurement: as many runs as requests
    times = {
        "direct_one": 0.0,
        "direct_large": 0.0,
        "one": 6e-5,
        "few": 2e-4,
        "large": 1e-3,
        "op_one": 2e-5,
        "op_few": 5e-5,
        "op_large": 8e-4,
    }
    run: Any = SimpleNamespace(bytes={1: 200, 256: 50_000}, **times)
    costs = fit_serving(loads, run)
    assert costs.direct is not None
    assert 0 < costs.run.base_s < 6e-5  # what it takes in this process


def test_what_a_rankers_run_and_its_requests_take_is_of_two_loads() -> None:
    """A run that merges many says little of one of two: by the sum alone, all would be the run's."""

    def load_of(ours: float, runs: float) -> SimpleNamespace:
        return SimpleNamespace(ours=ours, runs=runs, grpc=1e-4, asks=1e-4, io=1e-4, all=1e-3, cycle=1e-3, latency=1e-3)

    loop, base, request, client = 50e-6, 100e-6, 30e-6, 40e-6
    run, call, more = 150e-6, 60e-6, 25e-6

    def ours(runs: float, shards: int = 1) -> float:
        return loop + request + more + runs * (base + run + shards * (client + call))

    loads: Any = defaultdict(lambda: load_of(1e-3, 1.0))
    loads["ranker of 1", 1, 32] = load_of(ours(0.2), 0.2)
    loads["ranker of 1, single", 1, 32] = load_of(ours(1.0), 1.0)
    loads["ranker of 2, single", 1, 32] = load_of(ours(1.0, 2), 1.0)
    in_process: Any = SimpleNamespace(
        bytes={1: 200, 256: 50_000}, direct_one=1e-5, op_one=2e-5, op_few=5e-5, op_large=8e-4
    )
    end = EndCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    _, _, fan = _fit_remote(
        loads, in_process, end, replace(end, loop_s=loop), replace(end, loop_s=client), RunCosts(base, request, 0.0)
    )
    assert (fan.run_s, fan.call_s, fan.request_s) == pytest.approx((run, call, more))
    # Nothing shared a run: no second equation, and all that is left is the run's.
    loads["ranker of 1", 1, 32] = loads["ranker of 1, single", 1, 32]
    _, _, fan = _fit_remote(
        loads, in_process, end, replace(end, loop_s=loop), replace(end, loop_s=client), RunCosts(base, request, 0.0)
    )
    assert (fan.run_s, fan.call_s, fan.request_s) == pytest.approx((run + more, call, 0.0))


def means(loop: float, cycle: float, latency: float = 0.0) -> Any:
    return SimpleNamespace(loop=loop, cycle=cycle, latency=latency)


def test_what_sleep_costs_is_measured_at_three_lengths_of_it() -> None:
    # Hot 100 us; after 1, 2 and 6 ms of sleep 80, 130 and 150 us more: so 30 as soon as it sleeps.
    lone = [means(180e-6, 1.18e-3), means(230e-6, 2.23e-3), means(250e-6, 6.25e-3)]
    cold, points = _cold(lone, "loop", 100e-6)
    assert cold == pytest.approx(30e-6)
    assert np.array(points) == pytest.approx(np.array([(1e-3, 50e-6), (2e-3, 100e-6), (6e-3, 120e-6)]))
    # The line would begin below nothing: then it begins there.
    cold, points = _cold([means(110e-6, 1.11e-3), means(700e-6, 2.7e-3)], "loop", 100e-6)
    assert cold == 0.0
    assert np.array(points) == pytest.approx(np.array([(1e-3, 10e-6), (2e-3, 600e-6)]))
    # Noise: a longer sleep costs no less, a call that was cheaper than a hot one costs nothing more, no sleep is no point.
    cold, points = _cold([means(90e-6, 1.09e-3), means(150e-6, 2.15e-3), means(140e-6, 3.14e-3)], "loop", 100e-6)
    assert np.array(points) == pytest.approx(np.array([(1e-3, 0.0), (2e-3, 50e-6), (3e-3, 50e-6)]))
    assert _cold([means(1e-3, 1e-3)], "loop", 0.0) == (0.0, ())


def test_of_two_sleeps_a_call_the_known_one_is_taken_off() -> None:
    def cost(slept: float) -> float:
        return float(np.interp(slept, [0.0, 0.5e-3, 2e-3, 6e-3], [0.0, 100e-6, 250e-6, 300e-6]))

    def lone(pause: float, wait: float) -> Any:
        """It sleeps ``wait`` within a call and ``pause`` between two."""
        loop = 50e-6 + cost(pause) + (cost(wait) if wait else 0.0)
        return means(loop, pause + wait + loop, wait + loop / 2)

    found = _of_two_wakes([lone(0.5e-3, 0.5e-3), lone(2e-3, 0.4e-3), lone(6e-3, 2e-3)], "loop", 50e-6, 1.0, 2)
    assert np.array(found) == pytest.approx(np.array([(0.5e-3, 100e-6), (2e-3, 250e-6), (6e-3, 300e-6)]))
    # Nothing between two calls at first; then two sleeps that are both longer than any that is known.
    found = _of_two_wakes([lone(0.5e-3, 0.0), lone(1e-3, 1e-3)], "loop", 50e-6, 1.0, 1)
    assert np.array(found) == pytest.approx(np.array([(0.5e-3, 100e-6), (1e-3, cost(1e-3))]))
    # A timer is set for each pause: that is no sleep's.
    found = _of_two_wakes([lone(0.5e-3, 0.0), lone(1e-3, 1e-3)], "loop", 50e-6, 1.0, 1, 20e-6)
    assert np.array(found) == pytest.approx(np.array([(0.5e-3, 100e-6), (1e-3, cost(1e-3) - 10e-6)]))


def test_lone_costs_of_a_ranker_are_charged_once() -> None:
    """What its threads took of lone requests is their costs and what that sleep costs, whatever the rest is of."""

    def load_of(grpc: float, asks: float, cycle: float = 1e-3) -> SimpleNamespace:
        same = dict.fromkeys(("ours", "io", "all", "client_loop"), 1e-4)
        return SimpleNamespace(**same, runs=1.0, grpc=grpc, asks=asks, cycle=cycle, latency=1e-3)

    loads: Any = defaultdict(lambda: load_of(1e-4, 1e-4))
    for callers, cycle in ((4, 0.5e-3), (1, 1.2e-3), (-1, 2.4e-3), (0, 7e-3)):
        loads["ranker of 1", 1, callers] = load_of(300e-6 + 0.01 * cycle, 200e-6 + 0.02 * cycle, cycle)
        loads["ranker of 1's shard", 1, callers] = load_of(150e-6 + 0.03 * cycle, 0.0, cycle)
    loads["ranker of 2", 1, 1] = load_of(380e-6 + 0.01 * 1.2e-3, 260e-6 + 0.02 * 1.2e-3)
    in_process: Any = SimpleNamespace(
        bytes={1: 200, 256: 50_000}, direct_one=2e-5, op_one=2e-5, op_few=5e-5, op_large=8e-4
    )
    end = EndCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    at_once = replace(end, grpc_s=90e-6, io_s=20e-6)
    client = replace(end, io_s=1e-4)
    shard, shard_end, fan = _fit_remote(loads, in_process, at_once, end, client, RunCosts(1e-5, 1e-5, 0.0))
    assert fan.ask_s == pytest.approx(80e-6)
    assert fan.told_s == pytest.approx(60e-6)
    for cycle in (1.2e-3, 2.4e-3, 7e-3):
        took = 200e-6 + 0.02 * cycle
        assert fan.told_s + fan.back_s + at_sleep(fan.asks_cooled, cycle - took) == pytest.approx(took)
        assert at_once.io_s + at_sleep(fan.io_cooled, cycle) == pytest.approx(1e-4)
        took = 150e-6 + 0.03 * cycle
        hot = shard_end.grpc_s + shard.base_s + in_process.op_one
        assert hot + shard_end.grpc_cold_s + at_sleep(shard_end.grpc_cooled, cycle - took) == pytest.approx(took)


def test_a_caller_that_sends_on_time_takes_more() -> None:
    loads: Any = {
        ("direct", 1, callers): SimpleNamespace(client_loop=took) for callers, took in ((4, 1e-4), (-2, 1.4e-4))
    }
    assert _on_time(loads) == pytest.approx(4e-5)
    loads["direct", 1, -2].client_loop = 0.9e-4
    assert _on_time(loads) == 0.0
