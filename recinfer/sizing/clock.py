"""Simulated time: a heap of events, processors that jobs take turns on, and threads that run one job after another."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

__all__ = ["Clock", "Cpu", "Thread"]

SLICE_S = 3e-3

_Run = Callable[..., object]


class Clock:
    """Runs events in the order of their times; those of one time in the order in which they were set."""

    __slots__ = ("_heap", "_numbers", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, _Run, tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time: float, run: _Run, *args: Any) -> None:
        """Call ``run(*args)`` when it is ``time``."""
        heappush(self._heap, (time, next(self._numbers), run, args))

    def after(self, seconds: float, run: _Run, *args: Any) -> None:
        """Call ``run(*args)`` in ``seconds``."""
        heappush(self._heap, (self.now + seconds, next(self._numbers), run, args))

    def run(self, until: float = math.inf) -> None:
        """Go on until nothing is left to happen, or to the time ``until``."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, run, args = heappop(heap)
            self.events += 1
            run(*args)


class Cpu:
    """The cores of one host, and the line of jobs that wait for one.

    A job is one thread's work. It has a core until it ends or its time slice is over and others wait, as in a kernel's fair
    scheduler between threads that wake each other: what wakes up does not push others aside.

    Args:
        cores: jobs at a time.
        speed: seconds of work a second.
        slice_s: seconds until the next in line has its turn; Linux has about 3 ms.

    Attributes:
        busy: core-seconds that jobs had.
    """

    __slots__ = (
        "_clock",
        "_free",
        "_line",
        "_stall_begin",
        "_stall_end",
        "_stalled",
        "busy",
        "cores",
        "slice_s",
        "speed",
    )

    def __init__(self, clock: Clock, cores: int, speed: float = 1.0, slice_s: float = SLICE_S) -> None:
        self.cores, self.speed, self.slice_s = cores, speed, slice_s
        self.busy = 0.0
        self._clock = clock
        self._free = cores
        self._line: deque[tuple[float, _Run, tuple[Any, ...]]] = deque()
        self._stalled = 0.0  # seconds of stalls that are over
        self._stall_begin = self._stall_end = -1.0

    def start(self, seconds: float, run: _Run, *args: Any) -> None:
        """Begin a job of ``seconds`` of a core at speed 1, or put it in line; ``run(*args)`` is called at its end."""
        if self._free:
            self._free -= 1
            self._take(seconds, run, args)
        else:
            self._line.append((seconds, run, args))

    def stall(self, seconds: float) -> None:
        """Nothing runs for a while: the hypervisor, or the kernel, has other things to do."""
        now = self._clock.now
        if now >= self._stall_end:
            self._stalled += max(self._stall_end - self._stall_begin, 0.0)
            self._stall_begin = self._stall_end = now
        self._stall_end = max(self._stall_end, now + seconds)

    def _stalled_so_far(self) -> float:
        return self._stalled + max(min(self._clock.now, self._stall_end) - self._stall_begin, 0.0)

    def _take(self, seconds: float, run: _Run, args: tuple[Any, ...]) -> None:
        turn = min(seconds, self.slice_s) if self._line or seconds > self.slice_s else seconds
        self._clock.after(turn / self.speed, self._ended, turn, seconds - turn, self._stalled_so_far(), run, args)

    def _ended(self, turn: float, left: float, stalled: float, run: _Run, args: tuple[Any, ...]) -> None:
        now_stalled = self._stalled_so_far()
        if now_stalled > stalled + 1e-12:
            self._clock.after(now_stalled - stalled, self._ended, turn, left, now_stalled, run, args)
            return
        self.busy += turn / self.speed
        line = self._line
        if left > 0 and not line:
            self._take(left, run, args)
            return
        if left > 0:
            line.append((left, run, args))
        if line:
            self._take(*line.popleft())
        else:
            self._free += 1
        if left <= 0:
            run(*args)


class Thread:
    """One thread of a process: jobs in the order in which they came, one at a time, each on the host's processor.

    A thread that has nothing to do sleeps, and its caches are others'. So the first job after a sleep costs ``cold``
    seconds more than one behind another.
    """

    __slots__ = ("_cpu", "_queue", "_running")

    def __init__(self, cpu: Cpu) -> None:
        self._cpu = cpu
        self._queue: deque[tuple[float, _Run, tuple[Any, ...]]] = deque()
        self._running = False

    @property
    def idle(self) -> bool:
        """Whether it sleeps."""
        return not self._running

    def submit(self, seconds: float, cold: float, run: _Run, *args: Any) -> None:
        """A job behind those that wait."""
        if self._running:
            self._queue.append((seconds, run, args))
        else:
            self._running = True
            self._cpu.start(seconds + cold, self._ended, run, args)

    def next(self, seconds: float, run: _Run, *args: Any) -> None:
        """A job before those that wait; to be called while a job of this thread ends."""
        self._queue.appendleft((seconds, run, args))

    def _ended(self, run: _Run, args: tuple[Any, ...]) -> None:
        run(*args)
        if self._queue:
            seconds, after, its = self._queue.popleft()
            self._cpu.start(seconds, self._ended, after, its)
        else:
            self._running = False
