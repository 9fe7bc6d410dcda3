"""Processes of a deployment in simulated time: callers, servers with their queue, and the way of a call between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from recinfer.serving import batcher as rules
from recinfer.serving import direct as plain
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.remote.asks import MOST_BYTES
from recinfer.sizing.clock import Clock, Cpu, Points, Thread, at_sleep
from recinfer.sizing.costs import READ, TAKEN, DirectCosts, EndCosts, RunCosts, ServingCosts
from recinfer.sizing.lock import Lock
from recinfer.sizing.queue import Queue, Work

__all__ = ["Call", "Network", "Process", "Server", "Spread", "is_small"]

_DRAWS = 1 << 14
_LEAST_RATIO = 0.1
_BACK_STEPS = 2  # of the loop: the task of grpc.aio's that made the call goes on, and then who waits for that
_CALLER_WAKES = 2  # for an answer: who reads it, and the loop
_AT_ONCE_BYTES = 64 << 10  # of an answer that leave with the call that sends it; the rest is gRPC's own threads'


@dataclass(frozen=True)
class Network:
    """What lies between two hosts: seconds one way, bytes a second."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        """One way, of a message."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Spread:
    """How much longer than on average a job takes: draws from what was measured, again and again in one order.

    Measured are whole calls, in which ups and downs of their parts even out. Jobs are parts, drawn independently, so theirs
    are wider by the root of how many there are.
    """

    __slots__ = ("next",)

    def __init__(self, costs: ServingCosts, random: np.random.Generator) -> None:
        parts = np.array(costs.spread)
        draws = parts[random.integers(parts.size, size=_DRAWS)]
        draws = np.maximum(1 + (draws - 1) * math.sqrt(costs.parts), _LEAST_RATIO)
        self.next: Callable[[], float] = cycle((draws / draws.mean()).tolist()).__next__


class Process:
    """A process on a host: its event loop's thread, the one that takes gRPC's events, the one that takes those of calls that it
    makes itself, and one for what gRPC does below them. The first three run Python, one at a time.

    Args:
        end: of its calls: what sleep costs its threads. ``cooled``: that by thread, where it is another one's.

    Attributes:
        draw: how much longer than on average its next job takes.
    """

    __slots__ = ("asks", "cpu", "draw", "grpc", "io", "loop")

    def __init__(self, cpu: Cpu, spread: Spread, end: EndCosts, cooled: Mapping[str, Points] | None = None) -> None:
        self.cpu, self.draw = cpu, spread.next
        lock, grpc = Lock(), end.cooled("grpc")
        its = {"loop": end.cooled("loop"), "grpc": grpc, "asks": grpc, "io": end.cooled("io")} | dict(cooled or {})
        self.loop, self.grpc, self.asks = (Thread(cpu, its[name], lock) for name in ("loop", "grpc", "asks"))
        self.io = Thread(cpu, its["io"])

    @property
    def spent(self) -> dict[str, float]:
        """Seconds that its threads have had a core so far, by the names of recinfer.sizing.probe.Spent."""
        threads = {"loop": self.loop, "grpc": self.grpc, "asks": self.asks, "other": self.io}
        return {name: thread.spent / self.cpu.speed for name, thread in threads.items()}


class Server(Process):
    """A server: takes calls, runs them by the rules of its queue, answers.

    Args:
        lookup: CPU seconds of the op and the dense program, by samples.
        run: of a run around them; None: the measured costs'.
        queued: False: it has no queue, and every call is a run of its own, as a shard server has it.
        small: of requests that may be answered at once, on the thread that takes gRPC's events; None: none are.
        predicts: a small one is answered at once only while nothing waits for a run.
        cooled: what sleep costs its threads, where that is not as in other servers.
    """

    __slots__ = (
        "_coming",
        "_costs",
        "_lookup",
        "_predicts",
        "_queued",
        "_run_costs",
        "_small",
        "client",
        "clock",
        "outstanding",
        "queue",
    )

    def __init__(
        self,
        clock: Clock,
        cpu: Cpu,
        spread: Spread,
        costs: ServingCosts,
        batching: BatchConfig,
        lookup: Callable[[float], float],
        *,
        run: RunCosts | None = None,
        queued: bool = True,
        small: DirectCosts | None = None,
        predicts: bool = False,
        cooled: Mapping[str, Points] | None = None,
    ) -> None:
        loop = {"loop": costs.server.cooled("loop")}
        super().__init__(cpu, spread, small.server if small else costs.server, loop | dict(cooled or {}))
        self._small, self._predicts, self._queued = small, predicts, queued
        self.clock, self._costs, self._lookup = clock, costs, lookup
        self._run_costs = run or costs.run
        self.client = costs.client if small is None or not queued else small.client  # the other end of its calls
        self.queue = Queue(clock, cpu, self.loop, batching, self._cost, min(4, cpu.cores))
        self.outstanding = 0
        self._coming = 0  # handed to the loop, which has not come to them yet

    def _cost(self, works: Sequence[Work]) -> float:
        """CPU of a run; the work that takes longest makes all of it so."""
        run = self._run_costs
        num_bytes = samples = 0.0
        for work in works:
            call: Call = work.tag
            samples += call.samples
            num_bytes += call.bytes_in + call.bytes_out
        return (run.base_s + run.request_s * len(works) + run.byte_s * num_bytes + self._lookup(samples)) * self.draw()

    def _cost_at_once(self, work: Work) -> float:
        small, call = self._small, work.tag
        assert small is not None
        run = small.run if self._queued else self._run_costs
        seconds = run.base_s + run.byte_s * (call.bytes_in + call.bytes_out) + self._lookup(call.samples)
        return max(seconds - small.saved_s, 0.0) * self.draw()

    # ------------------------------------------------------ on gRPC's threads

    def receive(self, call: Call) -> None:
        """A call's bytes are here."""
        self.outstanding += 1
        if self._small is not None and self._is_small(call):
            call.end, call.small = self._small.server, True
        end, ratio = call.end, self.draw()
        seconds = (end.io_s * READ + end.io_byte_s * call.bytes_in) * ratio
        self.io.submit(seconds, end.io_cold_s * ratio, self._arrived, call)

    def _is_small(self, call: Call) -> bool:
        if self._queued:
            return is_small(call)
        return call.bytes_in <= (MOST_BYTES if call.quick else rules._INLINE_BYTES)

    def _arrived(self, call: Call) -> None:
        end, ratio = call.end, self.draw()
        self.io.submit(end.io_s * (1 - READ) * ratio, 0.0, _nothing)
        seconds = (end.grpc_s * TAKEN + end.grpc_byte_s * call.bytes_in) * ratio
        self.grpc.submit(seconds, end.grpc_cold_s * ratio, self._taken, call)

    def _taken(self, call: Call) -> None:
        """The thread that takes gRPC's events answers it, or hands it to the loop."""
        work = Work(call.samples, call.bytes_in, self._answer, call, call.deadline)
        if call.small:
            if self._begins_at_once(work):
                return
            call.end, call.small = self._costs.server, False
        end, ratio = call.end, self.draw()
        self._coming += 1
        self.loop.submit(end.loop_s / 2 * ratio, end.loop_cold_s * ratio, self.loop.steps, 1, self._handle, work)

    def _begins_at_once(self, work: Work) -> bool:
        """Answer a small request where it is, if that may be."""
        if self._predicts and (self._coming or not self.queue.may_go_straight(work)):
            return False
        self.queue.runs += 1
        self.queue.requests += 1
        seconds = self._cost_at_once(work)
        if not self._queued and work.num_bytes > rules._INLINE_BYTES:  # beside the thread that reads
            self.cpu.start(seconds, self._send, work.tag, work.tag.bytes_out)
            return True
        self.grpc.next(seconds, self._answer_at_once, work, seconds)
        return True

    def _answer_at_once(self, work: Work, seconds: float) -> None:
        if self._predicts:
            self.queue.went_straight(seconds)
        call: Call = work.tag
        self.grpc.next(call.end.grpc_byte_s * call.bytes_out * self.draw(), self._send, call, call.bytes_out)

    # ------------------------------------------------------------ on the loop

    def _handle(self, work: Work) -> None:
        self._coming -= 1
        call: Call = work.tag
        if not self._queued:
            self.queue.runs += 1
            self.queue.requests += 1
            self.cpu.start(self._cost((work,)), self.loop.submit, 0.0, 0.0, self._answer, work)
        elif call.bytes_in <= rules._INLINE_BYTES or self.queue.admits(call.bytes_in):
            # A long one is decoded on a thread; what that takes is counted with the run.
            self.queue.submit(work)
        else:
            work.refused = "full"
            self.queue.refused += 1
            self._answer(work)

    def _answer(self, work: Work) -> None:
        call: Call = work.tag
        call.refused = work.refused
        out = 0.0 if work.refused else call.bytes_out
        end, ratio = call.end, self.draw()
        seconds = (end.loop_s / 2 + end.loop_byte_s * out) * ratio
        if work.straight:
            self.loop.next(seconds, self._send, call, out)
        else:
            self.loop.submit(seconds, 0.0, self._send, call, out)

    # -------------------------------------------------------------- its answer

    def _send(self, call: Call, out: float) -> None:
        """The thread that ends a call sends what it can of the answer."""
        end = call.end
        if out > _AT_ONCE_BYTES and end.io_byte_s:
            self.io.submit(end.io_byte_s * out * self.draw(), 0.0, self._sent, call, out)
        else:
            self._sent(call, out)

    def _sent(self, call: Call, out: float) -> None:
        self.outstanding -= 1
        self.clock.after(self._costs.wire_s / 2 + call.network.seconds(out) + call.late, call.arrived, out)
        # The caller has its answer; gRPC says that the call is over.
        self.grpc.submit(call.end.grpc_s * (1 - TAKEN) * self.draw(), 0.0, _nothing)


def _nothing() -> None:
    pass


def is_small(call: Call, *, away: bool = False) -> bool:
    """Whether recinfer.serving.direct would answer it, or recinfer.serving.away: by its bytes, most of which are ids (8 each) and
    floats.
    """
    most_bytes, most_ids, most_floats = plain.DIRECT_BYTES, plain._MOST_IDS, plain._MOST_ANSWERED
    if away:
        most_bytes, most_ids, most_floats = plain.AWAY_BYTES, plain._AWAY_IDS, plain._AWAY_FLOATS
    return call.bytes_in <= min(most_bytes, 8 * most_ids) and call.bytes_out <= 4 * most_floats


class Call:
    """One call from a caller to a server and back.

    Attributes:
        caller: the process it comes from; None: somebody whose processor nobody else here needs.
        over: called with the call once the caller has its answer.
        refused: why there is none; empty when there is one.
        late: seconds that the answer is on its way besides.
        end: what the server's end of it costs; ``small``: it passes by the queue.
        timer_s: what its sender's loop does to send it at that moment.
        quick: the caller's event loop has nothing to do with it; ``begin`` is called at the end of a job that has sent it.
        from_ranker: it is a ranker's, to a shard.
    """

    __slots__ = (
        "_client",
        "_costs",
        "bytes_in",
        "bytes_out",
        "caller",
        "deadline",
        "end",
        "from_ranker",
        "late",
        "network",
        "over",
        "quick",
        "refused",
        "samples",
        "server",
        "small",
        "tag",
        "timer_s",
    )

    def __init__(
        self,
        costs: ServingCosts,
        caller: Process | None,
        server: Server,
        network: Network,
        samples: int,
        bytes_in: float,
        bytes_out: float,
        over: Callable[[Call], object],
        tag: Any = None,
        deadline: float = math.inf,
    ) -> None:
        self._costs, self.caller, self.server, self.network = costs, caller, server, network
        self.samples, self.bytes_in, self.bytes_out = samples, bytes_in, bytes_out
        self.over, self.tag, self.deadline = over, tag, deadline
        self.refused = ""
        self.late = 0.0
        self.quick = self.from_ranker = False
        self.timer_s = 0.0
        self.end, self.small = costs.server, False
        self._client = server.client

    def begin(self) -> None:
        """Send it; called at the end of a job of the caller's loop, or at any time."""
        end = self._client
        if self.quick:
            self._on_wire()
            return
        if self.caller is None:
            self.server.clock.after(end.loop_s / 2 + end.loop_byte_s * self.bytes_in, self._on_wire)
            return
        ratio = self.caller.draw()
        seconds = (end.loop_s / 2 + end.loop_byte_s * self.bytes_in + self.timer_s) * ratio
        self.caller.loop.submit(seconds, end.loop_cold_s * ratio, self._on_wire)

    def _on_wire(self) -> None:
        seconds = self._costs.wire_s / 2 + self.network.seconds(self.bytes_in)
        self.server.clock.after(seconds, self.server.receive, self)

    def arrived(self, out: float) -> None:
        """Its answer is at the caller's host."""
        end = self._client
        if self.caller is None:
            hot = end.loop_s / 2 + end.grpc_s + end.io_s + (end.loop_byte_s + end.grpc_byte_s + end.io_byte_s) * out
            wakes = _CALLER_WAKES * at_sleep(self._costs.wakes[:1], math.inf)
            self.server.clock.after(hot + wakes + end.loop_cold_s + end.grpc_cold_s + end.io_cold_s, self.over, self)
            return
        if self.from_ranker and self._costs.fan.io_s == 0.0:
            self._told(out)
            return
        ratio = self.caller.draw()
        seconds = (end.io_s * READ + end.io_byte_s * out) * ratio
        self.caller.io.submit(seconds, end.io_cold_s * ratio, self._read_by_grpc, out)

    def _read_by_grpc(self, out: float) -> None:
        assert self.caller is not None
        self.caller.io.submit(self._client.io_s * (1 - READ) * self.caller.draw(), 0.0, _nothing)
        self._told(out)

    def _told(self, out: float) -> None:
        end, caller, fan = self._client, self.caller, self._costs.fan
        assert caller is not None
        ratio = caller.draw()
        if self.from_ranker and (self.quick or fan.heard_s):
            cold = fan.asks_cold_s
            if cold is None:
                cold = 0.0 if self._costs.direct is None else self._costs.direct.server.grpc_cold_s
            if self.quick:
                caller.asks.submit(fan.told_s * ratio, cold * ratio, self.over, self)
            else:
                caller.asks.submit(fan.heard_s * ratio, cold * ratio, self._read, out)
            return
        if not end.grpc_s:
            self._read(out)
            return
        seconds = (end.grpc_s + end.grpc_byte_s * out) * ratio
        caller.grpc.submit(seconds, end.grpc_cold_s * ratio, self._read, out)

    def _read(self, out: float) -> None:
        end = self._client
        assert self.caller is not None
        ratio = self.caller.draw()
        seconds = (end.loop_s / 2 + end.loop_byte_s * out) * ratio
        loop = self.caller.loop
        loop.submit(seconds, end.loop_cold_s * ratio, loop.steps, _BACK_STEPS, self.over, self)
