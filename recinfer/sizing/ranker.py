"""A ranker in simulated time: its merged runs ask every shard, hedge the slow ones, and go on when all have answered."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recinfer.errors import ConfigError
from recinfer.serving import batcher as rules
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.pace import MOST_AWAY, gains_nothing
from recinfer.serving.remote import fanout
from recinfer.serving.remote.fan import hedge_delay
from recinfer.sizing.clock import Clock, Cpu, Thread
from recinfer.sizing.costs import ServingCosts
from recinfer.sizing.queue import Queue, Work
from recinfer.sizing.servers import Call, Network, Server, Spread, is_small
from recinfer.sizing.workload import Model, Shard

__all__ = ["Hedging", "Ranker"]


@dataclass(frozen=True)
class Hedging:
    """Whether a ranker asks a second replica when the first takes longer than 95 % of the others.

    Attributes:
        budget: at most this share of the calls is sent twice; 0: none is.
    """

    budget: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise ConfigError(f"hedging: budget {self.budget}; expected 0 to 1")


class _Pace:
    """The 95th percentile of the last answers of a shard, looked at as often as the real one is."""

    __slots__ = ("_count", "_last", "p95")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=fanout._SAMPLES)
        self._count = 0
        self.p95 = math.nan

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self._count += 1
        if self._count == fanout._ENOUGH or not self._count % fanout._REFRESH:
            ordered = sorted(self._last)
            self.p95 = ordered[int(0.95 * len(ordered))]


class Ranker(Server):
    """A server whose runs wait for shards.

    Args:
        shards: what each costs; ``replicas`` are the servers of each.
        late: draws by how much an answer of a shard is late; None: never.

    Attributes:
        calls, hedged, hedges_won: calls to shards, those that were sent to a second replica, and those that it won.
    """

    __slots__ = (
        "_budget",
        "_first",
        "_late",
        "_model",
        "_network",
        "_paces",
        "_replicas",
        "_shards",
        "_tokens",
        "calls",
        "hedged",
        "hedges_won",
        "outstanding_at",
    )

    def __init__(
        self,
        clock: Clock,
        cpu: Cpu,
        spread: Spread,
        costs: ServingCosts,
        batching: BatchConfig,
        *,
        model: Model,
        shards: Sequence[Shard],
        replicas: Sequence[Sequence[Server]],
        network: Network,
        late: Callable[[], float] | None = None,
        hedging: Hedging | None = None,
    ) -> None:
        its = {name: getattr(costs.fan, f"{name}_cooled") for name in ("loop", "grpc", "asks", "io")}
        cooled = {name: points for name, points in its.items() if points}
        super().__init__(clock, cpu, spread, costs, batching, lambda samples: 0.0, small=costs.direct, cooled=cooled)
        self.queue = Queue(clock, cpu, self.loop, batching, self._cost, rules._RUNS_AWAY, self._run_away)
        self._model, self._shards, self._replicas = model, shards, replicas
        self._network, self._late = network, late
        self._budget = (hedging or Hedging()).budget
        self._tokens = fanout._BURST
        self._paces: dict[tuple[int, int], _Pace] = {}
        self._first = round(spread.next() * 1e9)  # rankers do not all begin with the same replica
        # Of the calls of this ranker: it knows nothing of what others ask.
        self.outstanding_at: defaultdict[Server, int] = defaultdict(int)
        self.calls = self.hedged = self.hedges_won = 0

    def _is_small(self, call: Call) -> bool:
        return is_small(call, away=True)

    def _begins_at_once(self, work: Work) -> bool:
        """Requests need no event loop while few are under way: gRPC's threads ask, and answer."""
        mixes = gains_nothing(int(work.num_bytes), self._model.predicts)
        if self._coming and not mixes:
            return False
        if not self.queue.may_go_away(MOST_AWAY, self.clock.now - self.grpc.rested, mixes):
            return False
        most = self.queue.most_away(work, len(self._shards))
        if not self.queue.may_go_away(most, mixes=mixes):
            return False
        self.queue.begins_away(alone=most == 1)
        since, call, costs = self.clock.now, work.tag, self._costs.fan

        def over() -> None:
            self.queue.ends_away(since, work.samples, fan.computed_s)
            self._send(call, call.bytes_out)

        fan = _Fan(self, [work], work.samples, over, costs.back_s, quick=True)
        seconds = costs.away_s + costs.ask_s * len(self._shards) + self._costs.run.byte_s * work.num_bytes
        self.grpc.next(seconds * self.draw(), fan.ask)
        return True

    def _run_away(self, works: list[Work], over: Callable[[], None]) -> None:
        """One run: decode and split on the loop, ask, then join and the dense program."""
        costs = self._costs
        samples = sum(work.samples for work in works)
        sent = sum(work.tag.bytes_in for work in works)
        run = costs.run
        seconds = run.base_s + run.request_s * len(works) + run.byte_s * sent
        half = (costs.fan.run_s + costs.fan.call_s * len(self._shards) + costs.fan.request_s * len(works)) / 2
        seconds += half
        fan = _Fan(self, works, samples, over, half)
        self.loop.submit(seconds * self.draw(), 0.0, fan.ask)  # a task: it begins behind what waits for the loop

    def choose(self, shard: int, asked: Sequence[Server]) -> Server | None:
        """The replica with the fewest outstanding calls of this ranker; of several of them each in turn."""
        servers = self._replicas[shard]
        least, best = math.inf, None
        begin = (self._first + self.calls) % len(servers)
        at = self.outstanding_at
        for i in range(len(servers)):
            server = servers[begin - len(servers) + i]
            load = at.get(server, 0)
            if load < least and server not in asked:
                least, best = load, server
                if not least:
                    break
        return best

    def pace(self, shard: int, samples: int) -> _Pace:
        """Of answers of a shard to batches of about that size."""
        key = shard, samples.bit_length()
        found = self._paces.get(key)
        if found is None:
            found = self._paces[key] = _Pace()
        return found

    def may_hedge(self) -> bool:
        """Whether the budget allows one more call."""
        if self._tokens < 1.0 or not self._budget:
            return False
        self._tokens -= 1.0
        return True

    def earn(self) -> None:
        """A call was sent: a part of another may be."""
        self._tokens = min(fanout._BURST, self._tokens + self._budget)


class _Fan:
    """The calls of one run; putting their answers together takes ``join_s`` and more a byte.

    Args:
        quick: gRPC's threads make the calls, and ``over`` is called on one of theirs; else the loop does.

    Attributes:
        computed_s: seconds of the join and the dense program, once they are over; 0 where there is no dense program.
    """

    __slots__ = (
        "answered",
        "asked",
        "computed_s",
        "join_s",
        "over",
        "quick",
        "ranker",
        "samples",
        "since",
        "waiting",
        "works",
    )

    def __init__(
        self,
        ranker: Ranker,
        works: list[Work],
        samples: int,
        over: Callable[[], None],
        join_s: float,
        quick: bool = False,
    ) -> None:
        self.quick = quick
        self.ranker, self.works, self.samples, self.over, self.join_s = ranker, works, samples, over, join_s
        shards = len(ranker._shards)
        self.asked: list[list[Server]] = [[] for _ in range(shards)]
        self.answered = [False] * shards
        self.waiting = shards
        self.since = self.computed_s = 0.0

    def ask(self) -> None:
        """Send every shard its part."""
        self.since = self.ranker.clock.now
        for shard in range(len(self.answered)):
            self._send(shard, hedge=False)

    def _send(self, shard: int, hedge: bool) -> bool:
        ranker = self.ranker
        server = ranker.choose(shard, self.asked[shard])
        if server is None:
            return False
        self.asked[shard].append(server)
        ranker.outstanding_at[server] += 1
        ranker.calls += 1
        cost = ranker._shards[shard]
        samples = self.samples
        call = Call(
            ranker._costs,
            ranker,
            server,
            ranker._network,
            samples,
            cost.request_bytes(samples),
            cost.answer_bytes(samples),
            self._answer,
            (shard, hedge),
        )
        call.from_ranker, call.quick = True, self.quick and not hedge
        if ranker._late is not None:
            call.late = ranker._late()
        if hedge:
            ranker.hedged += 1
        else:
            ranker.earn()
            delay = hedge_delay(ranker.pace(shard, samples).p95)
            if len(ranker._replicas[shard]) > 1 and ranker._budget:
                ranker.clock.after(delay, self._slow, shard)
        call.begin()
        return True

    def _slow(self, shard: int) -> None:
        if self.answered[shard] or len(self.asked[shard]) > 1 or not self.ranker.may_hedge():
            return
        self._send(shard, hedge=True)

    def _answer(self, call: Call) -> None:
        ranker = self.ranker
        ranker.outstanding_at[call.server] -= 1
        shard, hedge = call.tag
        if self.answered[shard]:
            return
        self.answered[shard] = True
        ranker.pace(shard, self.samples).add(ranker.clock.now - self.since)
        if hedge:
            ranker.hedges_won += 1
        self.waiting -= 1
        if not self.waiting:
            self._join(ranker.asks if call.quick else ranker.loop)

    def _join(self, thread: Thread) -> None:
        """Put the vectors together and run the dense program, on the thread that heard of the last answer or, when that is
        long, beside it.
        """
        ranker, model, costs = self.ranker, self.ranker._model, self.ranker._costs
        got = sum(shard.answer_bytes(self.samples) for shard in ranker._shards)
        out = sum(work.tag.bytes_out for work in self.works)
        seconds = self.join_s + costs.fan.byte_s * got + costs.run.byte_s * out
        if model.predicts:
            seconds += model.dense(self.samples)
        seconds *= ranker.draw()
        self.computed_s = seconds if model.predicts else 0.0
        is_long = sum(work.num_bytes for work in self.works) > rules._INLINE_BYTES
        if is_long and not self.quick:
            ranker.cpu.start(seconds, ranker.loop.submit, 0.0, 0.0, self.over)
        elif is_long and model.predicts:
            ranker.cpu.start(seconds, self.over)
        elif self.quick:
            thread.next(seconds, self.over)
        else:
            thread.submit(seconds, 0.0, thread.steps, 1, self.over)
