"""Which deployment is the cheapest that keeps a promise: candidates, bounds on their cost, and simulations of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from recinfer.distributed.planner.calibration import HardwareProfile
from recinfer.distributed.planner.types import PlannerError
from recinfer.errors import ConfigError
from recinfer.serving.batcher import BatchConfig
from recinfer.sizing.arrivals import Trace
from recinfer.sizing.costs import ServingCosts
from recinfer.sizing.hosts import HostType
from recinfer.sizing.ranker import Hedging
from recinfer.sizing.servers import Network
from recinfer.sizing.simulate import Deployment, Outcome, Stragglers, simulate
from recinfer.sizing.workload import Model, Shards, shards_of

__all__ = ["Candidate", "Goal", "Settings", "latency_curve", "search"]

_QUICK_REQUESTS = 3000
_PROBE_REQUESTS = 1200
# Requests that meet no others: at most so many, so often, and so much of the time that one is under way.
_ALONE_REQUESTS, _ALONE_RATE, _ALONE_SHARE = 200, 20.0, 0.2
_FIRST_ALONE = 3
_PROBE_S, _FEWEST = 30.0, 20  # of probes; fewer requests say too little
_DEADLINE_S = 10.0  # of callers, where the promise is not longer
_FULLEST = 0.85  # share of its cores that a host may be given on paper; queues need the rest
_MAX_STEPS = 12
_GIVE_UP_COST = 1.5  # times the best price: dearer candidates are not simulated


@dataclass(frozen=True)
class Goal:
    """What is promised.

    Attributes:
        qps: requests a second.
        p99_s: seconds within which 99 % of them are answered.
    """

    qps: float
    p99_s: float

    def __post_init__(self) -> None:
        if not 0 < self.qps < math.inf or not 0 < self.p99_s < math.inf:
            raise ConfigError(f"goal: {self.qps} requests a second within {self.p99_s} s; expected more than 0")


@dataclass(frozen=True)
class Settings:
    """How the servers and the network are.

    Attributes:
        min_replicas: of every shard and of rankers, so that one may be lost.
        max_hosts: of a deployment.
    """

    batching: BatchConfig = field(default_factory=BatchConfig)
    network: Network = field(default_factory=lambda: Network(100e-6, 1.25e9))
    stragglers: Stragglers = field(default_factory=Stragglers)
    hedging: Hedging = field(default_factory=Hedging)
    min_replicas: int = 2
    max_hosts: int = 1000


@dataclass(frozen=True)
class Candidate:
    """One deployment that was looked at.

    Attributes:
        deployment: None where there cannot be one.
        p50_s, p99_s: simulated; nan where it was not.
        busy: share of the cores in use, by kind of host.
        cost: an hour, of all hosts; where it was not simulated, the least that it could be.
        meets: whether it keeps the promise.
        why: what is wrong with it, for people.
        table_bytes: of all tables, once.
    """

    host: HostType
    precision: str
    deployment: Deployment | None
    p50_s: float
    p99_s: float
    busy: dict[str, float]
    cost: float
    meets: bool
    why: str
    table_bytes: int
    hedged: float = 0.0


@dataclass(frozen=True)
class _Idea:
    """A precision, a kind of host and a number of shards, with the least that they can cost."""

    host: HostType
    shards: Shards
    least: Deployment
    alone_s: float

    def cost(self) -> float:
        return self.least.hosts * self.host.price


class _Search:
    def __init__(
        self,
        goal: Goal,
        trace: Trace,
        model: Model,
        costs: ServingCosts,
        settings: Settings,
        hardware: HardwareProfile | None,
        seed: int,
    ) -> None:
        self.goal, self.trace, self.model, self.costs, self.settings = goal, trace, model, costs, settings
        self.hardware, self.seed = hardware, seed
        self.simulated = 0

    def run(self, deployment: Deployment, shards: Shards, requests: int, qps: float, seed: int) -> Outcome:
        """Simulate that many requests."""
        s = self.settings
        self.simulated += 1
        return simulate(
            deployment,
            self.trace.at_rate(qps, requests, seed),
            self.model,
            shards,
            self.costs,
            batching=s.batching,
            network=s.network,
            stragglers=s.stragglers,
            hedging=s.hedging,
            deadline_s=max(_DEADLINE_S, self.goal.p99_s),
            seed=seed,
        )

    def least(self, host: HostType, num: int) -> Deployment:
        """The fewest hosts that there may be."""
        spare = self.settings.min_replicas
        return Deployment(num, spare, spare if num > 1 else 0, host.cores, host.workers)

    def idea(self, host: HostType, precision: str, num: int, *, probe: bool) -> _Idea | Candidate:
        """Plan the tables and find the least number of hosts that have the processors for it.

        Args:
            probe: else the fewest there may be stand for it.
        """

        def no(why: str, num_bytes: int = 0) -> Candidate:
            return Candidate(host, precision, None, math.nan, math.nan, {}, math.nan, False, why, num_bytes)

        fewest = self.least(host, num)
        if fewest.hosts > self.settings.max_hosts:  # not worth a plan
            return no(f"more than {self.settings.max_hosts} hosts")
        try:
            shards = shards_of(
                self.model,
                num,
                precision=None if precision == self.model.manifest.precision else precision,
                hardware=self.hardware,
                memory_bytes=host.table_bytes,
            )
        except PlannerError:
            return no(f"tables need more than {num} hosts")
        if not probe:
            return self.untried(host, shards, fewest)
        rankers = 0 if num == 1 else 1
        one = Deployment(num, 1, rankers, host.cores, host.workers)
        # Alone: how long a request takes, and what it costs each kind of host in core-seconds.
        alone = self._alone(one, shards)
        if alone.percentile(50) > self.goal.p99_s:
            return no(f"alone it takes {alone.percentile(50) * 1e3:.1f} ms", shards.bytes)
        # In numbers: what it costs when servers are half busy, and requests share runs.
        cpu = self._core_seconds(alone, one)
        rate = 0.5 * min(host.cores * (one.shards if kind == "shards" else 1) / s for kind, s in cpu.items() if s)
        busy = self.run(one, shards, _within(_PROBE_REQUESTS, rate), rate, self.seed)
        cpu = self._core_seconds(busy, one)
        room = host.cores * _FULLEST
        asked = {kind: math.ceil(self.goal.qps * seconds / room) for kind, seconds in cpu.items()}
        if num == 1:
            least = replace(fewest, replicas=max(fewest.replicas, asked["servers"]))
        else:
            replicas = max(fewest.replicas, math.ceil(self.goal.qps * cpu["shards"] / num / room))
            least = replace(fewest, replicas=replicas, rankers=max(fewest.rankers, asked["rankers"]))
        if least.hosts > self.settings.max_hosts:
            return no(f"more than {self.settings.max_hosts} hosts", shards.bytes)
        return _Idea(host, shards, least, alone.percentile(50))

    def untried(self, host: HostType, shards: Shards, least: Deployment) -> Candidate:
        """What can only be much dearer than one that keeps the promise."""
        return Candidate(
            host=host,
            precision=shards.precision,
            deployment=least,
            p50_s=math.nan,
            p99_s=math.nan,
            busy={},
            cost=least.hosts * host.price,
            meets=False,
            why="dearer, not tried",
            table_bytes=shards.bytes,
        )

    def _alone(self, one: Deployment, shards: Shards) -> Outcome:
        """Requests that hardly ever meet, as slowly as that takes."""
        first = self.run(one, shards, _FIRST_ALONE, _ALONE_RATE, self.seed)
        typical = first.percentile(50)
        if typical > self.goal.p99_s * _FIRST_ALONE:  # too slow also if each of them waited for the others
            return first
        rate = min(_ALONE_RATE, _ALONE_SHARE / typical)
        return self.run(one, shards, _within(_ALONE_REQUESTS, rate), rate, self.seed)

    def _core_seconds(self, outcome: Outcome, deployment: Deployment) -> dict[str, float]:
        seconds = len(outcome.latencies) / outcome.rate
        hosts = {"servers": deployment.replicas, "rankers": deployment.rankers}
        hosts["shards"] = deployment.shards * deployment.replicas
        num = len(outcome.latencies)
        return {kind: share * hosts[kind] * deployment.cores * seconds / num for kind, share in outcome.busy.items()}

    def keeps(self, outcome: Outcome) -> bool:
        """Whether the promise is kept."""
        return not outcome.refused and outcome.stable and outcome.percentile(99) <= self.goal.p99_s

    def grow(self, idea: _Idea, requests: int, ceiling: float) -> Candidate:
        """From the least deployment upwards until it keeps the promise, at a growing number of simulated requests."""
        deployment, why = idea.least, ""
        outcome: Outcome | None = None
        quick = True
        for step in range(_MAX_STEPS):
            count = min(_QUICK_REQUESTS, requests) if quick else requests
            outcome = self.run(deployment, idea.shards, count, self.goal.qps, self.seed + (0 if quick else 1))
            if self.keeps(outcome):
                if not quick or requests <= _QUICK_REQUESTS:
                    return self._candidate(idea, deployment, outcome, True, "")
                quick = False
                continue
            larger = self._larger(deployment, outcome)
            if larger.hosts > self.settings.max_hosts:
                why = f"more than {self.settings.max_hosts} hosts"
                break
            if larger.hosts * idea.host.price > ceiling:
                why = "dearer before it is fast enough"
                break
            if step == _MAX_STEPS - 1 or (step > 3 and max(outcome.busy.values()) < 0.15):
                why = "more hosts do not help"
                break
            deployment = larger
        assert outcome is not None
        return self._candidate(idea, deployment, outcome, False, why or "too slow")

    def _larger(self, deployment: Deployment, outcome: Outcome) -> Deployment:
        """More of the hosts that are busiest; of both kinds where they are about equally busy."""
        if not deployment.rankers:
            return replace(deployment, replicas=_more(deployment.replicas))
        shards, rankers = outcome.busy["shards"], outcome.busy["rankers"]
        replicas = _more(deployment.replicas) if shards > 0.8 * rankers else deployment.replicas
        ranking = _more(deployment.rankers) if rankers > 0.8 * shards else deployment.rankers
        return replace(deployment, replicas=replicas, rankers=ranking)

    def _candidate(self, idea: _Idea, deployment: Deployment, outcome: Outcome, meets: bool, why: str) -> Candidate:
        return Candidate(
            host=idea.host,
            precision=idea.shards.precision,
            deployment=deployment,
            p50_s=outcome.percentile(50),
            p99_s=outcome.percentile(99),
            busy=outcome.busy,
            cost=deployment.hosts * idea.host.price,
            meets=meets,
            why=why,
            table_bytes=idea.shards.bytes,
            hedged=outcome.hedged / max(outcome.calls, 1),
        )


def _within(count: int, rate: float) -> int:
    """As many requests as a probe has at ``rate``, at most ``count``."""
    return max(_FEWEST, min(count, int(rate * _PROBE_S)))


def _more(count: int) -> int:
    return count + max(1, round(count * 0.15))


def search(
    goal: Goal,
    trace: Trace,
    model: Model,
    costs: ServingCosts,
    *,
    hosts: Sequence[HostType],
    precisions: Sequence[str],
    shard_counts: Sequence[int] = (),
    settings: Settings | None = None,
    hardware: HardwareProfile | None = None,
    requests: int = 20_000,
    seed: int = 0,
    progress: Callable[[str, int, int], object] | None = None,
) -> list[Candidate]:
    """Candidates, the best first: those that keep the promise by price, then the rest.

    For every kind of host, precision and number of shards the least number of hosts follows from the processor time a
    request takes. From the cheapest of these lower bounds on, deployments are simulated and grown until they keep the
    promise; what could only be much dearer than one that does is listed without.

    Args:
        trace: sizes and pattern of the requests; it is brought to the goal's rate.
        precisions: of all tables.
        shard_counts: to try; empty: as few as the memory allows, and two and four times that.
        requests: simulated of each deployment that is answered for.
        progress: told what is looked at, how much is done, and of how much.

    Raises:
        ConfigError: no kind of host or precision.
    """
    if not hosts or not precisions:
        raise ConfigError("sizing needs at least one kind of host and one precision")
    work = _Search(goal, trace, model, costs, settings or Settings(), hardware, seed)
    say = progress or (lambda what, done, total: None)
    found: list[Candidate] = []
    kinds = [
        (host, precision, num)
        for host in hosts
        for precision in precisions
        for num in _shard_counts(model, host, precision, shard_counts, work.settings)
    ]
    # By the least that they can cost: what can only be dearer than one that keeps the promise needs no probe either.
    heap: list[tuple[float, int, int, _Idea | tuple[HostType, str, int]]] = []
    for at, kind in enumerate(kinds):
        fewest = work.least(kind[0], kind[2]).hosts
        heappush(heap, (fewest * kind[0].price, fewest, at, kind))
    best = math.inf
    while heap:
        cost, _, at, item = heappop(heap)
        done = 2 * len(kinds) - sum(1 if isinstance(left, _Idea) else 2 for *_, left in [*heap, (item,)])
        if isinstance(item, _Idea):
            if cost > _GIVE_UP_COST * best:
                found.append(work.untried(item.host, item.shards, item.least))
                continue
            say(f"simulating {item.least.shards} x {item.host.name}, {item.shards.precision}", done, 2 * len(kinds))
            candidate = work.grow(item, requests, _GIVE_UP_COST * best)
            found.append(candidate)
            if candidate.meets:
                best = min(best, candidate.cost)
            continue
        host, precision, num = item
        say(f"planning {num} x {host.name}, {precision}", done, 2 * len(kinds))
        idea = work.idea(host, precision, num, probe=cost <= _GIVE_UP_COST * best)
        if isinstance(idea, Candidate):
            found.append(idea)
        else:
            heappush(heap, (idea.cost(), idea.least.hosts, at, idea))
    say("done", 2 * len(kinds), 2 * len(kinds))

    def rank(candidate: Candidate) -> tuple[bool, float, int, int, float]:
        hosts_used = candidate.deployment.hosts if candidate.deployment else 1 << 30
        cost = candidate.cost if math.isfinite(candidate.cost) else math.inf
        # Of two at one price the more exact one, then the one with fewer hosts.
        return not candidate.meets, cost, -_bits(candidate.precision), hosts_used, candidate.p99_s

    return sorted(found, key=rank)


def _bits(precision: str) -> int:
    return {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}.get(precision, 8)


def _shard_counts(
    model: Model, host: HostType, precision: str, given: Sequence[int], settings: Settings
) -> Sequence[int]:
    if given:
        return sorted(set(given))
    bits = None if precision == model.manifest.precision else _bits(precision)
    total = sum(
        table.rows
        * (table.dim * (bits or table.data_type.bits) / 8 + (4 if (bits or table.data_type.bits) < 16 else 0))
        for table in model.manifest.tables
    )
    if not host.table_bytes:
        return [1]
    least = max(1, math.ceil(total / host.table_bytes))
    most = max(1, settings.max_hosts // max(settings.min_replicas, 1))
    counts = dict.fromkeys((least, *((least + 1,) if least > 1 else ()), 2 * least, 4 * least))
    return [n for n in counts if n <= most] or [least]  # too many, which is to be said


def latency_curve(
    candidate: Candidate,
    goal: Goal,
    trace: Trace,
    model: Model,
    costs: ServingCosts,
    *,
    settings: Settings | None = None,
    hardware: HardwareProfile | None = None,
    requests: int = 6000,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> list[tuple[float, float, float]]:
    """(requests a second, p50, p99) of a candidate at rates around the goal's, for a picture; infinite where it breaks."""
    assert candidate.deployment is not None
    num = candidate.deployment.shards
    precision = None if candidate.precision == model.manifest.precision else candidate.precision
    shards = shards_of(model, num, precision=precision, hardware=hardware, memory_bytes=candidate.host.table_bytes)
    work = _Search(goal, trace, model, costs, settings or Settings(), hardware, seed)
    shares = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75)
    found = []
    for at, share in enumerate(shares):
        outcome = work.run(candidate.deployment, shards, requests, share * goal.qps, seed)
        found.append((share * goal.qps, outcome.percentile(50), outcome.percentile(99)))
        if progress is not None:
            progress(at + 1, len(shares))
    return found
