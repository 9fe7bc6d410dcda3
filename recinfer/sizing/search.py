"""Which deployment is the cheapest that keeps a promise: candidates, bounds on their cost, and simulations of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
_PROBE_REQUESTS = 600
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
            seed=seed,
        )

    def idea(self, host: HostType, precision: str, num: int) -> _Idea | Candidate:
        """Plan the tables and find the least number of hosts that have the processors for it."""

        def no(why: str, num_bytes: int = 0) -> Candidate:
            return Candidate(host, precision, None, math.nan, math.nan, {}, math.nan, False, why, num_bytes)

        spare = self.settings.min_replicas
        if num * spare + (spare if num > 1 else 0) > self.settings.max_hosts:  # not worth a plan
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
        rankers = 0 if num == 1 else 1
        one = Deployment(num, 1, rankers, host.cores, host.workers)
        # Alone: how long a request takes, and what it costs each kind of host in core-seconds.
        alone = self.run(one, shards, _PROBE_REQUESTS, 20.0, self.seed)
        # In numbers: what it costs when servers are half busy, and requests share runs.
        cpu = self._core_seconds(alone, one)
        rate = 0.5 * min(host.cores * (one.shards if kind == "shards" else 1) / s for kind, s in cpu.items() if s)
        busy = self.run(one, shards, _PROBE_REQUESTS * 2, rate, self.seed)
        cpu = self._core_seconds(busy, one)
        room = host.cores * _FULLEST
        if num == 1:
            least = replace(one, replicas=max(spare, math.ceil(self.goal.qps * cpu["servers"] / room)))
        else:
            replicas = max(spare, math.ceil(self.goal.qps * cpu["shards"] / num / room))
            ranking = max(spare, math.ceil(self.goal.qps * cpu["rankers"] / room))
            least = replace(one, replicas=replicas, rankers=ranking)
        if alone.percentile(50) > self.goal.p99_s:
            return no(f"alone it takes {alone.percentile(50) * 1e3:.1f} ms", shards.bytes)
        if least.hosts > self.settings.max_hosts:
            return no(f"more than {self.settings.max_hosts} hosts", shards.bytes)
        return _Idea(host, shards, least, alone.percentile(50))

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
    ideas: list[_Idea] = []
    kinds = [
        (host, precision, num)
        for host in hosts
        for precision in precisions
        for num in _shard_counts(model, host, precision, shard_counts, work.settings)
    ]
    for at, (host, precision, num) in enumerate(kinds):
        say(f"planning {num} x {host.name}, {precision}", at, 2 * len(kinds))
        idea = work.idea(host, precision, num)
        if isinstance(idea, Candidate):
            found.append(idea)
        else:
            ideas.append(idea)
    ideas.sort(key=lambda idea: (idea.cost(), idea.least.hosts))
    best = math.inf
    for at, idea in enumerate(ideas):
        name = f"simulating {idea.least.shards} x {idea.host.name}, {idea.shards.precision}"
        say(name, 2 * len(kinds) - len(ideas) + at, 2 * len(kinds))
        if idea.cost() > _GIVE_UP_COST * best:
            why = "dearer, not tried"
            found.append(
                Candidate(
                    host=idea.host,
                    precision=idea.shards.precision,
                    deployment=idea.least,
                    p50_s=math.nan,
                    p99_s=math.nan,
                    busy={},
                    cost=idea.cost(),
                    meets=False,
                    why=why,
                    table_bytes=idea.shards.bytes,
                )
            )
            continue
        candidate = work.grow(idea, requests, _GIVE_UP_COST * best)
        found.append(candidate)
        if candidate.meets:
            best = min(best, candidate.cost)
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
