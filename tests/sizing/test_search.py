"""The search keeps its promise where one can be kept, says why where not, and reads costs and hosts strictly."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import ConfigError, NotFoundError
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.costs import DirectCosts, RunCosts, ServingCosts
from recinfer.sizing.hosts import EXAMPLE_HOSTS, HostType, priced, read_hosts
from recinfer.sizing.search import Goal, Settings, latency_curve, search
from recinfer.sizing.simulate import Deployment, Outcome, simulate
from recinfer.sizing.typical import TYPICAL_COSTS
from tests.sizing.models import COSTS, manifest_of, model_of

SMALL, LARGE = HostType("small", 4, 16.0, 0.2), HostType("large", 16, 64.0, 0.8)
TINY = HostType("tiny", 4, 1.66, 0.1)  # 75 MiB for tables: one table of 36 MB, or two
MODEL = model_of()


def found_for(qps: float, p99_ms: float, **options: Any) -> list[Any]:
    goal = Goal(qps, p99_ms / 1e3)
    options = {"hosts": [SMALL], "precisions": ["int8"], "requests": 2000, **options}
    return search(goal, poisson(qps, 2000, ids_per_sample=8, seed=1), MODEL, COSTS, **options)


def test_the_cheapest_that_keeps_the_promise_comes_first() -> None:
    found = found_for(3000.0, 10.0, hosts=[LARGE, SMALL])
    best = found[0]
    assert best.meets
    assert best.p99_s <= 0.01
    assert best.p50_s < best.p99_s
    assert best.cost == pytest.approx(best.deployment.hosts * best.host.price)
    assert all(c.cost >= best.cost for c in found if c.meets)
    assert best.deployment.replicas >= 2  # one may be lost
    assert [c.meets for c in found] == sorted((c.meets for c in found), reverse=True)


def test_more_requests_need_more_hosts() -> None:
    few, many = (found_for(qps, 10.0)[0] for qps in (2000.0, 60_000.0))
    assert few.meets
    assert many.meets
    assert many.deployment.hosts > few.deployment.hosts


def test_what_cannot_be_in_time_is_said() -> None:
    found = found_for(100.0, 0.5)
    assert not any(c.meets for c in found)
    assert any("alone it takes" in c.why for c in found)


def test_what_can_only_be_much_dearer_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(deployment: Deployment, *args: Any, **options: Any) -> Outcome:
        seen.append(deployment.cores)
        return simulate(deployment, *args, **options)

    monkeypatch.setattr("recinfer.sizing.search.simulate", counted)
    found = found_for(500.0, 10.0, hosts=[LARGE, SMALL])
    assert set(seen) == {SMALL.cores}
    dear = [c for c in found if c.host is LARGE]
    assert dear and all(c.why == "dearer, not tried" and c.cost >= 2 * LARGE.price and c.table_bytes for c in dear)


def test_requests_that_take_long_are_looked_at_alone() -> None:
    """At a rate at which most of them would meet, one of half a second seemed to take two."""
    goal, model = Goal(0.5, 1.0), model_of(dense_s=0.5)
    trace = poisson(0.5, 200, seed=1)
    asked: dict[str, Any] = {"hosts": [SMALL], "precisions": ["int8"], "shard_counts": [1], "requests": 200}
    (found,) = search(goal, trace, model, COSTS, **asked)
    assert found.meets, found.why
    assert 0.5 < found.p50_s < 0.7
    (slower,) = search(Goal(0.5, 0.4), trace, model, COSTS, **asked)
    assert 500 < float(slower.why.removeprefix("alone it takes ").removesuffix(" ms")) < 700


def test_too_many_hosts_are_said() -> None:
    found = found_for(500_000.0, 10.0, settings=Settings(max_hosts=4))
    assert not any(c.meets for c in found)
    assert any("more than 4 hosts" in c.why for c in found)


def test_tables_for_more_hosts_than_there_may_be_are_said() -> None:
    model = model_of(manifest_of(tables=8, rows=1_000_000))  # 288 MB: four hosts, each twice, and rankers
    asked = Goal(10.0, 1.0), poisson(10.0, 500, ids_per_sample=8), model, COSTS
    found = search(*asked, hosts=[TINY], precisions=["int8"], settings=Settings(max_hosts=3))
    assert [c.why for c in found] == ["more than 3 hosts"]


def test_tables_that_do_not_fit_one_host_are_sharded() -> None:
    model = model_of(manifest_of(tables=8, rows=1_000_000))  # 288 MB
    goal = Goal(1000.0, 0.02)
    found = search(
        goal,
        poisson(1000.0, 2000, ids_per_sample=8),
        model,
        COSTS,
        hosts=[TINY],
        precisions=["int8", "int4"],
        requests=2000,
    )
    best = found[0]
    assert best.meets
    assert best.deployment.shards > 1
    assert best.deployment.rankers >= 2
    assert best.precision == "int4"  # half the memory, so half the shards
    exact = next(c for c in found if c.precision == "int8" and c.deployment is not None)
    assert exact.deployment.shards > best.deployment.shards
    told = search(
        goal, poisson(1000.0, 2000), model, COSTS, hosts=[TINY], precisions=["int8"], shard_counts=[1], requests=2000
    )
    assert not told[0].meets
    assert "tables need more than 1 hosts" in told[0].why


def test_the_same_seed_finds_the_same() -> None:
    assert [asdict(c) for c in found_for(5000.0, 5.0)] == [asdict(c) for c in found_for(5000.0, 5.0)]


def test_the_curve_rises_with_the_rate() -> None:
    goal = Goal(5000.0, 0.01)
    trace = poisson(5000.0, 2000, ids_per_sample=8)
    best = found_for(5000.0, 10.0)[0]
    curve = latency_curve(best, goal, trace, MODEL, COSTS, requests=2000)
    rates, _, p99 = zip(*curve)
    assert list(rates) == sorted(rates)
    assert p99[-1] > p99[0]


@pytest.mark.parametrize("qps", [0.0, -1.0, float("inf"), float("nan")])
def test_a_goal_is_checked(qps: float) -> None:
    with pytest.raises(ConfigError, match="goal"):
        Goal(qps, 0.01)


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    found_for(1000.0, 10.0, progress=lambda what, done, total: told.append((what, done, total)))
    assert told[-1][1] == told[-1][2]
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# -- costs ------------------------------------------------------------------------------------------------------------


POINTS = ((1e-3, 1e-5), (5e-3, 3e-5))


def test_costs_come_back_from_their_file(tmp_path: Path) -> None:
    for costs in (
        COSTS,
        TYPICAL_COSTS,
        replace(COSTS, direct=DirectCosts(COSTS.server, COSTS.client, RunCosts(2e-5, 0.0, 1e-9))),
        replace(COSTS, stints_per_s=40.0, stint_s=(1e-5, 2e-3), paces={"direct": 1e-4}),
        replace(
            COSTS, wakes=POINTS, caller_s=2e-5, shard_end=COSTS.server, server=replace(COSTS.server, loop_cooled=POINTS)
        ),
        replace(COSTS, fan=replace(COSTS.fan, asks_cold_s=1e-5, asks_cooled=POINTS, grpc_cooled=POINTS)),
        replace(COSTS, direct=DirectCosts(replace(COSTS.server, io_cooled=POINTS), COSTS.client, COSTS.run)),
    ):
        costs.save(tmp_path / "serving.json")
        assert ServingCosts.load(tmp_path / "serving.json") == costs
        assert 3 < costs.parts < 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "recinfer.hardware/2"}, "not serving costs"),
        ({"stints_per_s": 1.0}, "stint_s"),
        ({"stints_per_s": 1.0, "stint_s": [-1e-3]}, "stint_s"),
        ({"paces": {"direct": -1.0}}, r"paces\.direct"),
        ({"paces": 1.0}, "incomplete"),
        ({"wire_s": -1.0}, "wire_s is -1"),
        ({"wire_s": True}, "wire_s is True"),
        ({"spread": [2.0, 1.0]}, "spread"),
        ({"stalls_per_s": 1.0}, "stall_s"),
        ({"stall_lost": [1.0]}, "stall_lost"),
        ({"stalls_per_s": 1.0, "stall_s": [0.01], "stall_lost": [1.5]}, "stall_lost"),
        ({"wakes": [[0.0, 1e-5]]}, "wakes: expected ascending pairs"),
        ({"wakes": [[1e-3, -1e-5]]}, "wakes"),
        ({"wakes": [[1e-3]]}, "incomplete"),
        ({"wakes": [["1", 1e-5]]}, "incomplete"),
        ({"server": asdict(replace(COSTS.server, io_cooled=POINTS[::-1]))}, r"server\.io_cooled"),
        ({"fan": asdict(replace(COSTS.fan, asks_cold_s=-1.0))}, r"fan\.asks_cold_s is -1"),
        ({"surplus": 1}, "unknown keys"),
        ({"server": {"loop_s": 1.0}}, "incomplete"),
        ({"direct": {"run": {}}}, "incomplete"),
        (
            {"direct": asdict(DirectCosts(COSTS.server, COSTS.client, RunCosts(-1.0, 0.0, 0.0)))},
            "direct.run.base_s is -1",
        ),
    ],
)
def test_costs_are_read_strictly(change: dict[str, Any], says: str) -> None:
    data = json.loads(COSTS.to_json()) | change
    with pytest.raises(ConfigError, match=says):
        ServingCosts.from_json(json.dumps(data))


def test_files_of_before_others_were_recorded_are_read() -> None:
    data = json.loads(COSTS.to_json())
    del data["stints_per_s"], data["stint_s"], data["paces"], data["fan"]["request_s"]
    assert (
        ServingCosts.from_json(json.dumps(data | {"work_s": 3e-5})) == COSTS
    )  # what they said of the pace tells too little


def test_files_that_say_what_each_second_of_sleep_costs_are_read() -> None:
    data = json.loads(COSTS.to_json())
    del data["wakes"], data["caller_s"], data["shard_end"]
    for name in ("asks_cold_s", "asks_cooled", "grpc_cooled", "loop_cooled"):
        del data["fan"][name]
    for name in ("loop_cooled", "grpc_cooled", "io_cooled"):
        del data["server"][name], data["client"][name]
    data["server"]["io_cooling"] = 0.05
    server = ServingCosts.from_json(json.dumps(data)).server
    assert server.cooled("io") == ((20e-3, pytest.approx(1e-3)),)
    assert server.cooled("loop") == ()
    assert replace(server, io_cooled=POINTS).cooled("io") == POINTS


def test_costs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="--serving"):
        ServingCosts.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="not JSON"):
        ServingCosts.from_json("{")


# -- hosts ------------------------------------------------------------------------------------------------------------


def test_hosts_are_read_and_priced(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    entry = {"name": "a", "cores": 8, "memory_gib": 32, "price": 0.5}
    path.write_text(json.dumps({"format": "recinfer.hosts", "version": 1, "hosts": [entry]}))
    (host,) = read_hosts(path)
    assert host == HostType("a", 8, 32, 0.5)
    assert 0 < host.table_bytes < 32 * 2**30
    assert priced([host], ["a=0.25"])[0].price == 0.25
    for text in ("b=1", "a", "a=cheap", "a=-1"):
        with pytest.raises(ConfigError, match="--price"):
            priced([host], [text])


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ([], "at least one"),
        ([{"name": "a"}], "expected an object of cores"),
        ([{"name": "a", "cores": 0, "memory_gib": 1, "price": 1}], "cores"),
        ([{"name": "a", "cores": 1, "memory_gib": "1", "price": 1}], "memory_gib"),
        ([{"name": "a", "cores": 1, "memory_gib": 1, "price": 1}] * 2, "one name"),
    ],
)
def test_hosts_are_read_strictly(tmp_path: Path, hosts: list[Any], says: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"format": "recinfer.hosts", "version": 1, "hosts": hosts}))
    with pytest.raises(ConfigError, match=says):
        read_hosts(path)


def test_example_hosts_differ() -> None:
    assert len({host.name for host in EXAMPLE_HOSTS}) == len(EXAMPLE_HOSTS)
    assert all(host.workers <= host.cores for host in EXAMPLE_HOSTS)


def test_costs_of_the_server_before_are_to_be_measured_again() -> None:
    for earlier in (2, 3):
        text = COSTS.to_json().replace("recinfer.serving/4", f"recinfer.serving/{earlier}")
        with pytest.raises(ConfigError, match=r"earlier server.*calibrate --serving"):
            ServingCosts.from_json(text)
