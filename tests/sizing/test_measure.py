"""Measuring for real: servers start, answer and end, and what is found is sane; a short, noisy run."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recinfer.inference.predictor import load
from recinfer.sizing import probe
from recinfer.sizing.costs import EndCosts, RunCosts
from recinfer.sizing.measure import (
    LOOKUP,
    _cold,
    _fit,
    _fit_remote,
    lookup_requests,
    measure_serving,
    write_sample_archive,
)
from recinfer.sizing.probe import ServerProcess, closed_loop, open_loop
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
def test_all_of_it() -> None:
    said: list[str] = []
    before = set(multiprocessing.active_children())  # of other tests
    # Costs are differences of means of a tenth of a second: other work on the machine can hide one, not all three times.
    for _ in range(3):
        costs = measure_serving(seconds=0.1, progress=said.append)
        run_s = costs.run.base_s + costs.run.request_s
        shard_s = costs.shard.base_s + (costs.direct or costs).server.grpc_s  # what a shard's call takes of that thread
        if min(run_s, shard_s) > 1e-5 and np.mean(costs.spread) == pytest.approx(1.0, rel=0.1):
            break
    else:
        pytest.fail(f"none of three measurements is sane: {costs}")
    told = costs.notes["measured"]
    if costs.direct is not None:  # past the queue, lookups are answered on the thread that takes gRPC's events
        direct, queued = (told[f"{kind}, batch 1, 32 callers"] for kind in ("direct", "whole"))
        assert direct["loop"] < 0.1 * direct["grpc"]
        assert queued["loop"] > direct["loop"]
        assert direct["grpc"] < sum(queued[thread] for thread in ("loop", "grpc", "run"))
    assert costs.server.grpc_s > 0
    assert any("ranker of 2" in text for text in said)
    assert set(multiprocessing.active_children()) <= before


def test_costs_are_found_where_no_requests_shared_a_run() -> None:
    def load_of(runs: float) -> SimpleNamespace:
        ends = ("loop", "grpc", "asks", "run", "io", "client_loop", "client_grpc", "client_io")
        times = dict.fromkeys((*ends, "ours", "all", "cycle", "latency", "usual"), 1e-4)
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
    run: Any = SimpleNamespace(bytes={1: 200, 256: 50_000}, direct=False, **times)
    costs = _fit(loads, run)
    assert costs.direct is None
    assert 0 < costs.run.base_s < 6e-5  # what it takes in this process


def test_what_a_rankers_run_and_its_requests_take_is_of_two_loads() -> None:
    """A run that merges many says little of one of two: by the sum alone, all would be the run's."""

    def load_of(ours: float, runs: float) -> SimpleNamespace:
        return SimpleNamespace(ours=ours, runs=runs, grpc=1e-4, asks=1e-4, all=1e-3, cycle=1e-3)

    loop, base, request, client = 50e-6, 100e-6, 30e-6, 40e-6
    run, call, more = 150e-6, 60e-6, 25e-6

    def ours(runs: float, shards: int = 1) -> float:
        return loop + request + more + runs * (base + run + shards * (client + call))

    loads: Any = defaultdict(lambda: load_of(1e-3, 1.0))
    loads["ranker of 1", 1, 32] = load_of(ours(0.2), 0.2)
    loads["ranker of 1, single", 1, 32] = load_of(ours(1.0), 1.0)
    loads["ranker of 2, single", 1, 32] = load_of(ours(1.0, 2), 1.0)
    in_process: Any = SimpleNamespace(
        bytes={1: 200, 256: 50_000}, direct=True, direct_one=1e-5, op_one=2e-5, op_few=5e-5, op_large=8e-4
    )
    end = EndCosts(*[0.0] * 9)
    _, fan = _fit_remote(
        loads, in_process, end, replace(end, loop_s=loop), replace(end, loop_s=client), RunCosts(base, request, 0.0)
    )
    assert (fan.run_s, fan.call_s, fan.request_s) == pytest.approx((run, call, more))
    # Nothing shared a run: no second equation, and all that is left is the run's.
    loads["ranker of 1", 1, 32] = loads["ranker of 1, single", 1, 32]
    _, fan = _fit_remote(
        loads, in_process, end, replace(end, loop_s=loop), replace(end, loop_s=client), RunCosts(base, request, 0.0)
    )
    assert (fan.run_s, fan.call_s, fan.request_s) == pytest.approx((run + more, call, 0.0))


def test_what_sleep_costs_is_a_line_through_two_lengths_of_it() -> None:
    def means(loop: float, cycle: float) -> Any:
        return SimpleNamespace(loop=loop, cycle=cycle)

    # Hot 100 us; 30 us more once it slept, and 50 us more for each ms: after 1 and 6 ms.
    cold, cooling = _cold(means(180e-6, 1.18e-3), means(430e-6, 6.43e-3), "loop", 100e-6)
    assert (cold, cooling) == pytest.approx((30e-6, 0.05))
    # The line would begin below nothing: then all of it is the sleep's.
    cold, cooling = _cold(means(110e-6, 1.11e-3), means(700e-6, 6.7e-3), "loop", 100e-6)
    assert (cold, cooling) == pytest.approx((0.0, 0.1))
    # Nothing slept longer: what the first took more.
    assert _cold(means(180e-6, 2e-3), means(170e-6, 1e-3), "loop", 100e-6) == pytest.approx((80e-6, 0.0))
