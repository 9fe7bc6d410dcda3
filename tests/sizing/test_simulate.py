"""Deployments under load: nothing is lost, the same seed gives the same, more replicas help, hedging keeps its bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from recinfer.errors import ConfigError
from recinfer.serving.batcher import BatchConfig
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.costs import READ, TAKEN, DirectCosts, RunCosts
from recinfer.sizing.ranker import Hedging
from recinfer.sizing.servers import Network
from recinfer.sizing.simulate import Deployment, Outcome, Stragglers, simulate
from recinfer.sizing.workload import Model, Shards, shards_of
from tests.sizing.models import COSTS, model_of

MODEL = model_of()


@pytest.fixture(scope="module")
def plans() -> dict[int, Shards]:
    return {num: shards_of(MODEL, num) for num in (1, 2, 4)}


def run(
    plans: dict[int, Shards], deployment: Deployment, qps: float, requests: int = 3000, **options: object
) -> Outcome:
    trace = poisson(qps, requests, ids_per_sample=MODEL.ids_per_sample, seed=5)
    return simulate(deployment, trace, MODEL, plans[deployment.shards], COSTS, **options)  # type: ignore[arg-type]


WHOLE, SHARDED = Deployment(1, 1, 0, cores=4), Deployment(2, 2, 1, cores=4)


@pytest.mark.parametrize("deployment", [WHOLE, SHARDED, replace(SHARDED, co_located=True, cores=2)])
def test_a_lone_request_takes_what_its_parts_take(plans: dict[int, Shards], deployment: Deployment) -> None:
    outcome = run(plans, deployment, 5.0, 400)
    server, client = COSTS.server, COSTS.client
    # The two ends of each call, less what is done after the answer or beside it; runs; asking shards.
    callers = client.loop_s + READ * client.io_s + 2 * client.loop_cold_s + client.io_cold_s + COSTS.wire_s
    servers = READ * server.io_s + server.io_cold_s + TAKEN * server.grpc_s + server.grpc_cold_s
    handled = server.loop_s + server.loop_cold_s + COSTS.run.base_s + COSTS.run.request_s
    expected = callers + servers + handled
    if deployment.rankers:
        expected += callers + servers - client.loop_cold_s + COSTS.shard.base_s
        expected += COSTS.fan.run_s + 2 * COSTS.fan.call_s
    if not deployment.co_located:
        expected -= client.loop_cold_s  # the caller's own host: it wakes up for the answer alone
    assert outcome.percentile(50) == pytest.approx(expected, rel=0.1)
    assert outcome.refused == 0
    assert outcome.runs == pytest.approx(1.0, rel=0.05)


DIRECT = replace(COSTS, direct=DirectCosts(replace(COSTS.server, loop_s=0.0), COSTS.client, RunCosts(20e-6, 0.0, 1e-9)))


def test_a_lone_small_request_needs_no_loop_of_its_ranker(plans: dict[int, Shards]) -> None:
    trace = poisson(5.0, 400, ids_per_sample=MODEL.ids_per_sample, seed=5)
    outcome = simulate(SHARDED, trace, MODEL, plans[2], DIRECT)
    server, client, fan = COSTS.server, COSTS.client, COSTS.fan
    caller = client.loop_s + READ * client.io_s + client.loop_cold_s + client.io_cold_s + COSTS.wire_s
    ends = READ * server.io_s + server.io_cold_s + TAKEN * server.grpc_s + server.grpc_cold_s
    shard = ends + COSTS.shard.base_s + COSTS.wire_s + READ * client.io_s + client.io_cold_s
    answers = 2 * fan.told_s + server.grpc_cold_s + fan.back_s
    expected = caller + ends + fan.away_s + 2 * fan.ask_s + shard + answers
    assert outcome.percentile(50) == pytest.approx(expected, rel=0.1)
    assert outcome.runs == pytest.approx(1.0, rel=0.05)


def test_what_threads_and_timers_take_is_in_a_lone_request(plans: dict[int, Shards]) -> None:
    trace = poisson(5.0, 300, ids_per_sample=MODEL.ids_per_sample, seed=5)
    together = replace(SHARDED, co_located=True)

    def with_(**change: object) -> Outcome:
        return simulate(together, trace, MODEL, plans[2], replace(DIRECT, **change))  # type: ignore[arg-type]

    before, even = with_(), with_(spread=(1.0, 1.0))
    # The caller; who reads and who takes the request at ranker and shard; who reads the answer and who hears of it, twice.
    wakes = ((1e-3, 5e-5),)
    assert with_(wakes=wakes).percentile(50) - before.percentile(50) == pytest.approx(9 * 5e-5, rel=0.15)
    woken = with_(wakes=wakes, spread=(1.0, 1.0))
    assert woken.spent["server"]["grpc"] == pytest.approx(even.spent["server"]["grpc"], rel=0.01)  # it does nothing yet
    timed = with_(caller_s=1e-4)
    assert timed.percentile(50) - before.percentile(50) == pytest.approx(1e-4, rel=0.3)
    assert timed.spent["caller"]["loop"] - before.spent["caller"]["loop"] == pytest.approx(300 * 1e-4, rel=0.1)
    # A ranker's threads and a shard's cool down by lines of their own, and a caller by that of the calls that it makes.
    line = ((1e-3, 2e-4),)
    assert DIRECT.direct is not None
    caller = with_(direct=replace(DIRECT.direct, client=replace(COSTS.client, loop_cooled=line)))
    more = caller.spent["caller"]["loop"] - before.spent["caller"]["loop"]
    assert 1.5 * 2e-4 < more / 300 < 2.1 * 2e-4
    warm, cooled = (with_(fan=replace(COSTS.fan, asks_cold_s=0.0, asks_cooled=points)) for points in ((), line))
    assert cooled.spent["server"]["asks"] - warm.spent["server"]["asks"] == pytest.approx(300 * 2e-4, rel=0.2)
    assert warm.spent["server"]["asks"] < before.spent["server"]["asks"]
    assert cooled.spent["server"]["grpc"] == pytest.approx(before.spent["server"]["grpc"], rel=0.05)
    quiet, sent = (with_(fan=replace(COSTS.fan, io_s=0.0, io_cooled=points)) for points in ((), line))
    assert sent.spent["server"]["other"] - quiet.spent["server"]["other"] == pytest.approx(300 * 2e-4, rel=0.2)
    shards = with_(shard_end=replace(COSTS.server, io_cooled=line))
    assert shards.spent["shard"]["other"] - before.spent["shard"]["other"] == pytest.approx(2 * 300 * 2e-4, rel=0.2)
    assert shards.spent["server"]["other"] == pytest.approx(before.spent["server"]["other"], rel=0.05)


@pytest.mark.parametrize("deployment", [WHOLE, SHARDED])
@pytest.mark.parametrize("qps", [50.0, 2000.0, 50_000.0])
def test_every_request_is_answered_or_refused_once(
    plans: dict[int, Shards], deployment: Deployment, qps: float
) -> None:
    outcome = run(plans, deployment, qps, batching=BatchConfig(max_queue=20), deadline_s=0.3)
    answered = int(np.isfinite(outcome.latencies).sum())
    assert answered + outcome.refused == 3000
    assert answered > 0
    assert (outcome.latencies[np.isfinite(outcome.latencies)] > 0).all()
    if deployment.rankers:
        assert outcome.calls - outcome.hedged == pytest.approx(2 * answered / outcome.runs, rel=0.15)
    if qps == 50_000.0:
        assert outcome.refused > 0
        assert outcome.percentile(99) == float("inf") or outcome.refused < 30
    assert all(0 <= share <= 1.001 for share in outcome.busy.values())


def test_the_same_seed_gives_the_same_and_another_another(plans: dict[int, Shards]) -> None:
    first, again = (run(plans, SHARDED, 1500.0, seed=3) for _ in range(2))
    assert (first.latencies == again.latencies).all()
    assert first.events == again.events
    other = run(plans, SHARDED, 1500.0, seed=4)
    assert (first.latencies != other.latencies).any()


def test_more_replicas_are_never_slower(plans: dict[int, Shards]) -> None:
    found = [run(plans, replace(WHOLE, replicas=n), 4000.0, 6000) for n in (1, 2, 4, 8)]
    p99 = [outcome.percentile(99) for outcome in found]
    assert all(after <= 1.1 * before for before, after in pairwise(p99))
    assert p99[-1] < p99[0]
    assert found[-1].busy["servers"] < found[0].busy["servers"]


def test_more_rankers_and_shards_share_the_work(plans: dict[int, Shards]) -> None:
    few = run(plans, SHARDED, 1500.0)  # at twice that one ranker runs six requests at a time, which three cannot
    more = run(plans, replace(SHARDED, rankers=3), 1500.0)
    assert more.busy["rankers"] < 0.75 * few.busy["rankers"]
    assert more.percentile(99) < few.percentile(99)


def test_larger_messages_take_longer_on_a_slow_network(plans: dict[int, Shards]) -> None:
    fast = run(plans, SHARDED, 100.0, 500)
    slow = run(plans, SHARDED, 100.0, 500, network=Network(1e-3, 1e6))
    assert slow.percentile(50) - fast.percentile(50) > 4e-3  # two hops there and back, and the bytes


def test_hedging_bounds_the_tail_within_its_budget(plans: dict[int, Shards]) -> None:
    late = Stragglers(share=0.02, seconds=0.05)
    deployment = replace(SHARDED, rankers=2, replicas=3)
    without = run(plans, deployment, 400.0, 6000, stragglers=late, hedging=Hedging(0.0))
    with_it = run(plans, deployment, 400.0, 6000, stragglers=late, hedging=Hedging(0.1))
    assert without.hedged == 0
    assert 0 < with_it.hedged <= 0.1 * (with_it.calls - with_it.hedged) + 2 * 10  # two rankers' bursts
    assert 0 < with_it.hedges_won <= with_it.hedged
    assert with_it.percentile(99) < 0.5 * without.percentile(99)
    assert with_it.percentile(50) == pytest.approx(without.percentile(50), rel=0.1)


def test_nothing_is_hedged_where_there_is_nobody_else(plans: dict[int, Shards]) -> None:
    outcome = run(plans, replace(SHARDED, replicas=1), 400.0, 1000, stragglers=Stragglers(0.1, 0.05))
    assert outcome.hedged == 0


def test_stalls_show_in_the_tail_alone(plans: dict[int, Shards]) -> None:
    costs = replace(COSTS, stalls_per_s=2.0, stall_s=(0.02,), stall_lost=(1.0,))
    trace = poisson(300.0, 3000, seed=5)
    calm = simulate(WHOLE, trace, MODEL, plans[1], COSTS)
    stalled = simulate(WHOLE, trace, MODEL, plans[1], costs)
    assert stalled.percentile(50) == pytest.approx(calm.percentile(50), rel=0.1)
    assert stalled.percentile(99) > calm.percentile(99) + 0.008


@pytest.mark.parametrize(
    ("qps", "requests"), [(12_000.0, 3_000), (12_000.0, 15_000), (30_000.0, 3_000), (30_000.0, 15_000)]
)
def test_queues_that_grow_are_not_stable(plans: dict[int, Shards], qps: float, requests: int) -> None:
    """Somewhat more than can be answered, where later ones take longer, and far more, where all take equally long."""
    overloaded = run(plans, WHOLE, qps, requests, batching=BatchConfig(max_queue=100_000), deadline_s=1e6)
    assert not overloaded.stable


@pytest.mark.parametrize(("qps", "requests"), [(500.0, 100), (500.0, 3_000), (3_000.0, 3_000)])
def test_queues_that_do_not_grow_are_stable(plans: dict[int, Shards], qps: float, requests: int) -> None:
    assert run(plans, WHOLE, qps, requests).stable
    far = Network(latency_s=0.05, bytes_per_s=1e9)  # most of a short trace is under way at its end
    assert run(plans, WHOLE, qps, requests, network=far).stable


def test_a_predict_costs_its_dense_program() -> None:
    lookup, predict = model_of(), model_of(dense_s=3e-3)
    trace = poisson(20.0, 300, seed=1)
    times = [simulate(WHOLE, trace, model, shards_of(model, 1), COSTS).percentile(50) for model in (lookup, predict)]
    assert times[1] - times[0] == pytest.approx(3e-3, rel=0.15)


def test_small_requests_pass_by_the_queue_and_large_ones_do_not(plans: dict[int, Shards]) -> None:
    def both(model: Model, deployment: Deployment, batch: int = 1, qps: float = 2500.0) -> list[Outcome]:
        ids = model.ids_per_sample
        trace = poisson(qps, 1500, batch=batch, ids_per_sample=ids, seed=5)
        plan = shards_of(model, deployment.shards)
        return [simulate(deployment, trace, model, plan, each) for each in (COSTS, DIRECT)]

    queued, direct = both(MODEL, WHOLE)
    assert queued.runs > 1.5 and direct.runs == 1.0, "what passes by shares no run"
    assert direct.percentile(50) < 0.7 * queued.percentile(50)
    queued, direct = both(MODEL, WHOLE, 2048, 20.0)
    assert (queued.latencies == direct.latencies).all()
    for qps in (100.0, 2000.0):  # a ranker's, while few are under way
        queued, direct = both(MODEL, SHARDED, qps=qps)
        assert direct.percentile(50) < 0.8 * queued.percentile(50)
        assert direct.runs == pytest.approx(1.0, rel=0.01)
    queued, direct = both(MODEL, SHARDED, qps=8000.0)
    assert direct.runs > 1.5, "those of a ranker of which many are under way share runs"
    queued, direct = both(model_of(dense_s=2e-3), SHARDED, qps=1000.0)
    assert direct.runs > 1.2, "and sooner where each of them computes for long"
    queued, direct = both(model_of(dense_s=1e-4), WHOLE, qps=100.0)  # predictions, while they come one by one
    assert direct.percentile(50) < 0.8 * queued.percentile(50)
    queued, direct = both(model_of(dense_s=1e-4), WHOLE, qps=4000.0)
    assert direct.runs > 1.5, "predictions that come together share runs"


def test_what_does_not_fit_together_is_refused(plans: dict[int, Shards]) -> None:
    with pytest.raises(ConfigError, match="expected 2"):
        simulate(SHARDED, poisson(1.0, 10), MODEL, plans[4], COSTS)
    with pytest.raises(ConfigError, match="need rankers"):
        Deployment(2, 1, 0, cores=4)
    with pytest.raises(ConfigError, match="at least one"):
        Deployment(1, 0, 0, cores=4)
    with pytest.raises(ConfigError, match="stragglers"):
        Stragglers(1.5, 0.1)
    with pytest.raises(ConfigError, match="budget"):
        Hedging(-0.1)


def test_shards_cover_the_tables(plans: dict[int, Shards]) -> None:
    model: Model = MODEL
    whole = plans[1].ranks[0]
    assert whole.bytes == sum(t.rows * (t.dim + 4) for t in model.manifest.tables)
    for num, shards in plans.items():
        assert len(shards.ranks) == num
        assert shards.bytes == pytest.approx(whole.bytes, rel=0.01)
        assert sum(rank.ids for rank in shards.ranks) >= whole.ids - 1e-6
        assert all(rank.lookup(1) < rank.lookup(64) < rank.lookup(8192) for rank in shards.ranks if rank.streams)
    int4 = shards_of(model, 2, precision="int4")
    assert int4.precision == "int4"
    assert int4.bytes < 0.6 * whole.bytes
