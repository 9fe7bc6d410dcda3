"""One deployment under one trace: callers, rankers, shard servers and their hosts, request by request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import ConfigError
from recinfer.serving.batcher import BatchConfig
from recinfer.sizing.arrivals import Trace
from recinfer.sizing.clock import Clock, Cpu
from recinfer.sizing.costs import DirectCosts, ServingCosts
from recinfer.sizing.disturbances import Comings, held_up
from recinfer.sizing.ranker import Hedging, Ranker
from recinfer.sizing.servers import Call, Network, Process, Server, Spread
from recinfer.sizing.stalls import Stall
from recinfer.sizing.stints import Stint
from recinfer.sizing.workload import Model, Shards

__all__ = ["Deployment", "Outcome", "Stragglers", "simulate"]


_BEHIND = 0.05  # of all requests may be under way at the end of a trace that is kept up with
_FEW_TIMES = 4


@dataclass(frozen=True)
class Stragglers:
    """Answers of shard servers that come late for reasons of their host (a neighbour, a retransmission).

    Attributes:
        share: of all answers, 0 to 1.
        seconds: by which one is late, on average (exponential).
    """

    share: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not 0 <= self.seconds < math.inf:
            raise ConfigError(f"stragglers: share {self.share} and {self.seconds} s; expected 0 to 1, and seconds")


@dataclass(frozen=True)
class Deployment:
    """How many hosts do what.

    Attributes:
        shards: ranks that the tables are cut into; 1 with ``rankers`` 0 is servers that hold everything.
        replicas: hosts of each shard.
        rankers: hosts that hold the dense part and ask the shards; 0: none.
        cores: of each host.
        workers: server processes a host, each with an address of its own.
        co_located: all processes, the caller's too, are on one host of ``cores``: as in a trial on one machine.
    """

    shards: int
    replicas: int
    rankers: int
    cores: int
    workers: int = 1
    co_located: bool = False

    def __post_init__(self) -> None:
        if min(self.shards, self.replicas, self.cores, self.workers) < 1 or self.rankers < 0:
            raise ConfigError(f"{self}: expected at least one shard, replica, core and worker")
        if self.shards > 1 and not self.rankers:
            raise ConfigError(f"{self.shards} shards need rankers that ask them")

    @property
    def hosts(self) -> int:
        """All of them."""
        return 1 if self.co_located else self.shards * self.replicas + self.rankers


@dataclass(frozen=True)
class Outcome:
    """What callers and hosts saw.

    Attributes:
        latencies: seconds of each request, in the order of arrival; nan where it was refused.
        counted: the requests after the warm-up, those that figures are of.
        rate: requests a second of the trace.
        refused: requests that got an error.
        waiting: requests that were under way when the last one came.
        busy: share of the cores in use, by kind of host.
        calls, hedged, hedges_won: of rankers to shards.
        runs: requests a run, on average, where callers come in.
        spent: CPU seconds by process (``"caller"``, ``"server"``: those that callers ask, ``"shard"``) and thread.
        events: simulated.
        seconds: that the simulation took.
    """

    latencies: NDArray[np.float64]
    counted: slice
    rate: float
    refused: int
    waiting: int
    busy: dict[str, float]
    calls: int
    hedged: int
    hedges_won: int
    runs: float
    spent: dict[str, dict[str, float]]
    events: int
    seconds: float

    def percentile(self, percent: float) -> float:
        """Seconds within which that many of all requests were answered; infinite where that many were not."""
        mine = np.where(np.isnan(self.latencies), np.inf, self.latencies)[self.counted]
        return float(np.quantile(mine, percent / 100, method="higher"))

    @property
    def stable(self) -> bool:
        """Whether the queues do not grow: requests of the last third took about as long as those of the first, and about
        as many were answered as came. Far above what can be answered, all wait alike, so the first is not enough.
        """
        mine = self.latencies[self.counted]
        third = max(mine.size // 3, 1)
        first, last = (np.nanmedian(p) if np.isfinite(p).any() else np.inf for p in (mine[:third], mine[-third:]))
        if not last < 2 * first:
            return False
        under_way = self.rate * float(np.nanmin(self.latencies))  # if each took as long as the quickest
        return bool(self.waiting < _BEHIND * self.latencies.size + _FEW_TIMES * under_way)


@dataclass
class _World:
    """What is built for one simulation."""

    clock: Clock
    costs: ServingCosts
    model: Model
    shards: Shards
    random: np.random.Generator
    batching: BatchConfig
    network: Network
    cpus: dict[str, list[Cpu]] = field(default_factory=dict)
    spread: Spread = field(init=False)  # of all processes: a list of draws for each would take longer than their jobs

    def __post_init__(self) -> None:
        self.spread = Spread(self.costs, self.random)


def simulate(
    deployment: Deployment,
    trace: Trace,
    model: Model,
    shards: Shards,
    costs: ServingCosts,
    *,
    batching: BatchConfig | None = None,
    network: Network | None = None,
    stragglers: Stragglers | None = None,
    hedging: Hedging | None = None,
    deadline_s: float = 10.0,
    warm_up: float = 0.1,
    stalls: Sequence[Stall] | None = None,
    stints: Sequence[Stint] | None = None,
    speed: float = 1.0,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Outcome:
    """Run ``trace`` through ``deployment``.

    The same arguments give the same outcome, whatever the machine.

    Args:
        shards: the plan for as many ranks as the deployment has shards.
        batching: the servers' options.
        network: between any two hosts; the measured costs are over loopback, which has none.
        deadline_s: after which a caller gives up; its request may then be refused.
        warm_up: share of the trace, from its start, that figures leave out.
        stalls: of the one host of a co-located deployment, seconds from the trace's start; None: random ones, as often and as
            long as was measured.
        stints: of others on that host, likewise.
        speed: of that host, seconds of measured work a second.
        progress: told now and then how many requests were answered.

    Raises:
        ConfigError: ``shards`` is of another number of ranks, or ``stalls`` or ``stints`` of another number of hosts or cores.
    """
    if len(shards.ranks) != deployment.shards:
        raise ConfigError(f"the plan has {len(shards.ranks)} ranks; expected {deployment.shards}")
    begin = time.perf_counter()
    link = Network() if deployment.co_located else network or Network()
    random = np.random.default_rng(seed)
    world = _World(Clock(), costs, model, shards, random, batching or BatchConfig(), link)
    one = Cpu(world.clock, deployment.cores, speed, wakes=costs.wakes) if deployment.co_located else None
    doors: list[Server]
    rankers: list[Ranker] = []
    replicas: list[list[Server]] = []
    if deployment.rankers:
        replicas = _shard_servers(world, deployment, one)
        rankers = _rankers(world, deployment, one, replicas, stragglers or Stragglers(), hedging or Hedging())
        doors = list(rankers)
    else:
        doors = _whole_servers(world, deployment, one)
    caller = Process(one, world.spread, doors[0].client) if one is not None else None
    _disturb(world, stalls=stalls is None, visits=stints is None)
    if stalls is not None:
        _stall_as_recorded(world, one, stalls)
    if stints is not None:
        _visit_as_recorded(world, one, stints)
    latencies = np.full(len(trace), np.nan)
    refused, end = _drive(world, trace, doors, caller, latencies, deadline_s, progress)
    return Outcome(
        latencies=latencies,
        counted=slice(int(warm_up * len(trace)), None),
        rate=trace.qps,
        refused=refused,
        waiting=int((latencies > trace.times[-1] - trace.times).sum()),
        busy={
            name: sum(c.busy for c in cpus) / sum(c.cores for c in cpus) / max(end, 1e-9)
            for name, cpus in world.cpus.items()
        },
        calls=sum(r.calls for r in rankers),
        hedged=sum(r.hedged for r in rankers),
        hedges_won=sum(r.hedges_won for r in rankers),
        runs=sum(d.queue.requests for d in doors) / max(sum(d.queue.runs for d in doors), 1),
        spent={
            "caller": _spent([caller] if caller else []),
            "server": _spent(doors),
            "shard": _spent([server for servers in replicas for server in servers]),
        },
        events=world.clock.events,
        seconds=time.perf_counter() - begin,
    )


def _spent(processes: Sequence[Process]) -> dict[str, float]:
    found: dict[str, float] = {}
    for process in processes:
        for name, seconds in process.spent.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _disturb(world: _World, *, stalls: bool, visits: bool) -> None:
    """Cores stand still at random moments, and other programs, and the kernel, want them at others."""
    costs = world.costs
    lost = list(zip(costs.stall_s, costs.stall_lost, strict=True)) if stalls else []
    wanted = [(seconds, 1.0) for seconds in costs.stint_s] if visits else []
    for cpu in dict.fromkeys(cpu for cpus in world.cpus.values() for cpu in cpus):
        for core in range(cpu.cores):
            of_stalls, of_visits = world.random.spawn(2)
            cpu.disturb(
                core, Comings(of_stalls, costs.stalls_per_s, lost), Comings(of_visits, costs.stints_per_s, wanted)
            )


def _visit_as_recorded(world: _World, one: Cpu | None, stints: Sequence[Stint]) -> None:
    host = _recorded_on("stints", one, stints)
    for stint in stints:
        if stint.begin >= 0:
            world.clock.at(stint.begin, host.visit, stint.seconds, stint.core)


def _recorded_on(what: str, one: Cpu | None, found: Sequence[Stall] | Sequence[Stint]) -> Cpu:
    """The one host that they are of."""
    if one is None:
        raise ConfigError(f"{what}: they are of one host; expected a deployment that is co-located")
    for each in found:
        if not 0 <= each.core < one.cores:
            raise ConfigError(f"{what}: got core {each.core}, expected 0 to {one.cores - 1}")
    return one


def _stall_as_recorded(world: _World, one: Cpu | None, stalls: Sequence[Stall]) -> None:
    host = _recorded_on("stalls", one, stalls)
    for stall in stalls:
        end = stall.begin + stall.seconds
        if end > 0:
            begin = max(stall.begin, 0.0)
            for at, seconds in held_up(begin, end - begin, stall.lost):
                world.clock.at(at, host.stall, seconds, stall.core)


def _host(world: _World, deployment: Deployment, one: Cpu | None, kind: str) -> Cpu:
    cpu = one or Cpu(world.clock, deployment.cores, wakes=world.costs.wakes)
    known = world.cpus.setdefault("host" if one is not None else kind, [])
    if cpu not in known[-1:]:
        known.append(cpu)
    return cpu


def _whole_servers(world: _World, deployment: Deployment, one: Cpu | None) -> list[Server]:
    lookup, dense = world.shards.ranks[0].lookup, world.model.dense
    predicts = world.model.predicts

    def seconds(samples: float) -> float:
        return lookup(samples) + (dense(samples) if predicts else 0.0)

    found = []
    for _ in range(deployment.replicas):
        cpu = _host(world, deployment, one, "servers")
        for _ in range(deployment.workers):
            server = Server(
                world.clock,
                cpu,
                world.spread,
                world.costs,
                world.batching,
                seconds,
                small=world.costs.direct,
                predicts=predicts,
            )
            found.append(server)
    return found


def _shard_servers(world: _World, deployment: Deployment, one: Cpu | None) -> list[list[Server]]:
    found = []
    small = world.costs.direct or DirectCosts(world.costs.server, world.costs.client, world.costs.shard)
    small = replace(small, server=world.costs.shard_end or small.server)
    for shard in world.shards.ranks:
        servers = []
        for _ in range(deployment.replicas):
            cpu = _host(world, deployment, one, "shards")
            for _ in range(deployment.workers):
                servers.append(
                    Server(
                        world.clock,
                        cpu,
                        world.spread,
                        world.costs,
                        world.batching,
                        shard.lookup,
                        run=world.costs.shard,
                        queued=False,
                        small=small,
                    )
                )
        found.append(servers)
    return found


def _rankers(
    world: _World,
    deployment: Deployment,
    one: Cpu | None,
    replicas: Sequence[Sequence[Server]],
    stragglers: Stragglers,
    hedging: Hedging,
) -> list[Ranker]:
    found = []
    for _ in range(deployment.rankers):
        cpu = _host(world, deployment, one, "rankers")
        for _ in range(deployment.workers):
            random = np.random.default_rng(world.random.integers(1 << 62))
            found.append(
                Ranker(
                    world.clock,
                    cpu,
                    world.spread,
                    world.costs,
                    world.batching,
                    model=world.model,
                    shards=world.shards.ranks,
                    replicas=replicas,
                    network=world.network,
                    late=late_answers(stragglers.share, stragglers.seconds, random),
                    hedging=hedging,
                )
            )
    return found


def late_answers(share: float, seconds: float, random: np.random.Generator) -> Callable[[], float] | None:
    """Draws by how much an answer is late; None: none ever is."""
    if not share or not seconds:
        return None
    draws = np.where(random.random(1 << 14) < share, random.exponential(seconds, 1 << 14), 0.0)
    return cycle(draws.tolist()).__next__


def _drive(
    world: _World,
    trace: Trace,
    doors: Sequence[Server],
    caller: Process | None,
    latencies: NDArray[np.float64],
    deadline_s: float,
    progress: Callable[[int], object] | None,
) -> tuple[int, float]:
    """Feed the trace to the doors in turn and run to the end; returns how many were refused, and when the last one was over."""
    clock, model = world.clock, world.model
    times, batches, ids = trace.times.tolist(), trace.batches.tolist(), trace.ids.tolist()
    ends: list[float] = [math.nan] * len(times)
    state, end = {"refused": 0, "over": 0}, 0.0
    step = max(len(times) // 50, 1)

    def over(call: Call) -> None:
        nonlocal end
        end = clock.now
        if call.refused:
            state["refused"] += 1
        else:
            ends[call.tag] = clock.now
        state["over"] += 1
        if progress is not None and not state["over"] % step:
            progress(state["over"])

    def come(i: int) -> None:
        if i + 1 < len(times):
            clock.at(times[i + 1], come, i + 1)
        samples = batches[i]
        call = Call(
            world.costs,
            caller,
            doors[i % len(doors)],
            world.network,
            samples,
            model.request_bytes(samples, ids[i]),
            model.answer_bytes(samples),
            over,
            i,
            clock.now + deadline_s,
        )
        call.timer_s = world.costs.caller_s
        call.begin()

    clock.at(times[0], come, 0)
    clock.run()
    latencies[:] = np.array(ends) - trace.times
    return state["refused"], end
