"""Processes of a deployment in simulated time: callers, servers with their queue, and the way of a call between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from recinfer.serving import batcher as rules
from recinfer.serving import direct as plain
from recinfer.serving.batcher import BatchConfig
from recinfer.sizing.clock import Clock, Cpu, Thread
from recinfer.sizing.costs import DirectCosts, EndCosts, RunCosts, ServingCosts
from recinfer.sizing.queue import Queue, Work

__all__ = ["Call", "Network", "Process", "Server", "Spread"]

_DRAWS = 1 << 14
_LEAST_RATIO = 0.1
_VISITS = 3  # of the loop for one call: it is accepted, its request is there, its answer has left
_IO_PARTS = 4  # of gRPC's own thread: before each of these, and to send


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
    """A process on a host: its event loop's thread, and one for what gRPC does beside it.

    Attributes:
        draw: how much longer than on average its next job takes.
    """

    __slots__ = ("cpu", "draw", "io", "loop")

    def __init__(self, cpu: Cpu, spread: Spread) -> None:
        self.cpu, self.draw = cpu, spread.next
        self.loop, self.io = Thread(cpu), Thread(cpu)


class Server(Process):
    """A server: takes calls, runs them by the rules of its queue, answers.

    Args:
        lookup: CPU seconds of the op and the dense program, by samples.
        run: of a run around them; None: the measured costs'.
        direct: it has no queue: every call is a run of its own, at once.
        small: of small requests that pass by the queue; None: none do.
    """

    __slots__ = ("_at_door", "_costs", "_direct", "_lookup", "_run_costs", "_small", "clock", "outstanding", "queue")

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
        direct: bool = False,
        small: DirectCosts | None = None,
    ) -> None:
        super().__init__(cpu, spread)
        self._small = small
        self.clock, self._costs, self._lookup = clock, costs, lookup
        self._run_costs, self._direct = run or costs.run, direct
        self.queue = Queue(clock, cpu, self.loop, batching, self._cost, min(4, cpu.cores))
        self.outstanding = 0
        self._at_door: deque[Call] = deque()

    def _cost(self, works: Sequence[Work], costs: RunCosts | None = None) -> float:
        """CPU of a run; the work that takes longest makes all of it so."""
        run = costs or self._run_costs
        num_bytes = samples = 0.0
        for work in works:
            call: Call = work.tag
            samples += call.samples
            num_bytes += call.bytes_in + call.bytes_out
        return (run.base_s + run.request_s * len(works) + run.byte_s * num_bytes + self._lookup(samples)) * self.draw()

    def receive(self, call: Call) -> None:
        """A call is here. gRPC's event loop server takes calls one at a time: the next one when it has taken this."""
        self.outstanding += 1
        if self._small is not None and _is_small(call):
            call.end, call.small = self._small.server, True
        self._at_door.append(call)
        if len(self._at_door) == 1:
            self._accept()

    def _accept(self) -> None:
        call = self._at_door[0]
        self._visit(call, self._accepted, 0.0)

    def _visit(self, call: Call, then: Callable[[Call], None], num_bytes: float) -> None:
        """gRPC's thread tells the loop of something, and the loop turns to it: a part of what a call costs here."""
        end, ratio = call.end, self.draw()
        seconds = (end.io_s / _IO_PARTS + end.io_byte_s * num_bytes) * ratio
        self.io.submit(seconds, end.io_cold_s / _IO_PARTS * ratio, self._turn, call, then, num_bytes)

    def _turn(self, call: Call, then: Callable[[Call], None], num_bytes: float) -> None:
        end, ratio = call.end, self.draw()
        seconds = (end.loop_s / _VISITS + end.loop_byte_s * num_bytes) * ratio
        self.loop.submit(seconds, end.loop_cold_s / _VISITS * ratio, then, call)

    def _accepted(self, call: Call) -> None:
        self._at_door.popleft()
        if self._at_door:
            self._accept()
        self._visit(call, self._handle, call.bytes_in)

    def _handle(self, call: Call) -> None:
        work = Work(call.samples, call.bytes_in, self._answer, call, call.deadline)
        if self._direct:
            self._run_at_once(work)
        elif call.small and self._small is not None:
            self.queue.runs += 1
            self.queue.requests += 1
            work.straight = True
            self.loop.next(self._cost((work,), self._small.run), self._answer, work)
        elif call.bytes_in <= rules._INLINE_BYTES:
            self.queue.submit(work)
        elif self.queue.take_place(call.bytes_in):
            # Decoded on a thread; what that takes is counted with the run.
            self.queue.leave_place(call.bytes_in)
            self.queue.submit(work)
        else:
            work.refused = "full"
            self.queue.refused += 1
            self._answer(work)

    def _run_at_once(self, work: Work) -> None:
        self.queue.runs += 1
        self.queue.requests += 1
        if work.num_bytes <= rules._INLINE_BYTES:
            work.straight = True
            self.loop.next(self._cost((work,)), self._answer, work)
        else:
            self.cpu.start(self._cost((work,)), self.loop.submit, 0.0, 0.0, self._answer, work)

    def _answer(self, work: Work) -> None:
        call: Call = work.tag
        call.refused = work.refused
        out = 0.0 if work.refused else call.bytes_out
        end, ratio = call.end, self.draw()
        seconds = end.loop_byte_s * out * ratio
        if work.straight:
            self.loop.next(seconds, self._send, call, out)
        else:
            self.loop.submit(seconds, 0.0, self._send, call, out)

    def _send(self, call: Call, out: float) -> None:
        end, ratio = call.end, self.draw()
        seconds = (end.io_s / _IO_PARTS + end.io_byte_s * out) * ratio
        self.io.submit(seconds, end.io_cold_s / _IO_PARTS * ratio, self._sent, call, out)

    def _sent(self, call: Call, out: float) -> None:
        self.outstanding -= 1
        self.clock.after(self._costs.wire_s / 2 + call.network.seconds(out) + call.late, call.arrived, out)
        # The caller has its answer; the loop hears of that.
        self._visit(call, _nothing, 0.0)


def _nothing(call: Call) -> None:
    pass


def _is_small(call: Call) -> bool:
    """Whether recinfer.serving.direct would answer it: by its bytes, most of which are ids (8 each) and floats."""
    small_in = call.bytes_in <= min(plain.DIRECT_BYTES, 8 * plain._MOST_IDS)
    return small_in and call.bytes_out <= 4 * plain._MOST_FLOATS


class Call:
    """One call from a caller to a server and back.

    Attributes:
        caller: the process it comes from; None: somebody whose processor nobody else here needs.
        over: called with the call once the caller has its answer.
        refused: why there is none; empty when there is one.
        late: seconds that the answer is on its way besides.
        end: what the server's end of it costs; ``small``: it passes by the queue.
    """

    __slots__ = (
        "_costs",
        "bytes_in",
        "bytes_out",
        "caller",
        "deadline",
        "end",
        "late",
        "network",
        "over",
        "refused",
        "samples",
        "server",
        "small",
        "tag",
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
        self.end, self.small = costs.server, False

    def begin(self) -> None:
        """Send it; called at the end of a job of the caller's loop, or at any time."""
        end = self._costs.client
        if self.caller is None:
            self.server.clock.after(_alone(end, self.bytes_in), self._on_wire)
            return
        ratio = self.caller.draw()
        seconds = (end.loop_s / 2 + end.loop_byte_s * self.bytes_in) * ratio
        self.caller.loop.submit(seconds, end.loop_cold_s * ratio, self._leave)

    def _leave(self) -> None:
        end = self._costs.client
        assert self.caller is not None
        seconds = (end.io_s / 2 + end.io_byte_s * self.bytes_in) * self.caller.draw()
        self.caller.io.submit(seconds, 0.0, self._on_wire)

    def _on_wire(self) -> None:
        seconds = self._costs.wire_s / 2 + self.network.seconds(self.bytes_in)
        self.server.clock.after(seconds, self.server.receive, self)

    def arrived(self, out: float) -> None:
        """Its answer is at the caller's host."""
        end = self._costs.client
        if self.caller is None:
            self.server.clock.after(_alone(end, out) + end.loop_cold_s + end.io_cold_s, self.over, self)
            return
        ratio = self.caller.draw()
        seconds = (end.io_s / 2 + end.io_byte_s * out) * ratio
        self.caller.io.submit(seconds, end.io_cold_s * ratio, self._read, out)

    def _read(self, out: float) -> None:
        end = self._costs.client
        assert self.caller is not None
        ratio = self.caller.draw()
        seconds = (end.loop_s / 2 + end.loop_byte_s * out) * ratio
        self.caller.loop.submit(seconds, end.loop_cold_s * ratio, self.over, self)


def _alone(end: EndCosts, num_bytes: float) -> float:
    return (end.loop_s + end.io_s) / 2 + (end.loop_byte_s + end.io_byte_s) * num_bytes
