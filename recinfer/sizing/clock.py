"""Simulated time: a heap of events, cores that threads take turns on, and threads that run one job after another."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from recinfer.serving.pace import REST_S
from recinfer.sizing.disturbances import Comings, Stalls
from recinfer.sizing.lock import SWITCH_S, Lock

__all__ = ["COLD_S", "Clock", "Cpu", "Points", "Thread", "at_sleep"]

SLICE_S = 3e-3
HOT_S = 0.5e-3
COLD_S = 20e-3  # of sleep, after which nothing of a thread is left in the caches

_Run = Callable[..., object]

Points = Sequence[tuple[float, float]]
"""What sleep costs: (seconds asleep, seconds), both ascending."""


def at_sleep(points: Points, slept: float, begin: float = 0.0) -> float:
    """Seconds that belong to a sleep: on lines from ``begin``, which is that of no sleep, through the points, and the last
    one's beyond it: what the caches have lost after some milliseconds they cannot lose again.
    """
    before = 0.0
    for until, seconds in points:
        if slept < until:
            return begin + (seconds - begin) * (slept - before) / (until - before)
        before, begin = until, seconds
    return begin


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
    """The cores of one host, each with a line of threads that wait for it, as a kernel has them.

    A thread that wakes up takes the core that it had last, else any that is free, else it waits in the line of its last
    core; it pushes nobody aside. It has a core until it has nothing to do, or its time slice is over and others wait. A
    core that becomes free takes the first of its line, or a thread from the line of another core, but only one whose
    caches are cold: what has run lately stays where it is, also when that means to wait beside a core that is free.

    Args:
        cores: threads at a time.
        speed: seconds of work a second.
        slice_s: seconds until the next in line has its turn; Linux has about 3 ms.
        hot_s: seconds after its last turn for which a thread is not moved; Linux has 0.5 ms.
        wakes: seconds from when a thread is woken until it runs on a core that is free, by how long it had slept.

    Attributes:
        busy: core-seconds that threads had.
    """

    __slots__ = (
        "_clock",
        "_cores",
        "_first_wake",
        "_wakes",
        "busy",
        "cores",
        "hot_s",
        "slice_s",
        "speed",
    )

    def __init__(
        self,
        clock: Clock,
        cores: int,
        speed: float = 1.0,
        slice_s: float = SLICE_S,
        hot_s: float = HOT_S,
        wakes: Points = (),
    ) -> None:
        self.cores, self.speed, self.slice_s, self.hot_s = cores, speed, slice_s, hot_s
        self.busy = 0.0
        self._wakes, self._first_wake = wakes, wakes[0][1] if wakes else 0.0
        self._clock = clock
        self._cores = [_Core() for _ in range(cores)]

    @property
    def now(self) -> float:
        """The clock's time."""
        return self._clock.now

    def start(self, seconds: float, run: _Run, *args: Any) -> None:
        """A thread of its own for one job of ``seconds`` of a core at speed 1; ``run(*args)`` is called at its end."""
        Thread(self).submit(seconds, 0.0, run, *args)

    def disturb(self, core: int, stalls: Comings, visits: Comings) -> None:
        """From now on a core stands still, and is wanted by others, at random; as :meth:`stall` and :meth:`visit` say it.

        Only what meets somebody is simulated: most cores have nothing to do most of the time.
        """
        self._cores[core].stalls, self._cores[core].visits = Stalls(stalls), visits

    def stall(self, seconds: float, core: int | None = None) -> None:
        """Nothing runs for a while, on one core or on all: the hypervisor, or the kernel, has other things to do."""
        for each in self._cores if core is None else (self._cores[core],):
            each.stalls.begin(self._clock.now, seconds)

    def visit(self, seconds: float, core: int) -> None:
        """A thread of somebody else's wakes up that had this core last, and needs one for so long."""
        self._visit(self._cores[core], seconds)

    def wake(self, thread: Thread) -> None:
        """A thread has something to do."""
        lock = thread.lock
        if lock is None or lock.take(thread, self._clock.now):
            self._place(thread)

    def _place(self, thread: Thread) -> None:
        """Give it a core, or a place in the line for one."""
        now = self._clock.now
        for core in self._cores:
            if not core.running and core.visits is not None and core.visits.due <= now:
                self._catch_up(core, core.visits)
        last = thread.core
        if last is None or last.running:
            free = next((core for core in self._cores if not core.running), None)
            if free is None:
                last = last or min(self._cores, key=_length)
                last.line.append(thread)
                return
            last = free
        if not self._wakes or thread.prompt:
            self._give(last, thread)
            return
        # The core is its own from now on, but has to be woken too.
        last.running, thread.core = True, last
        self._watch(last)
        slept = at_sleep(self._wakes, now - thread.ran, self._first_wake)
        self._clock.after(slept / self.speed, self._give, last, thread)

    def _give(self, core: _Core, thread: Thread) -> None:
        core.running, core.used = True, 0.0
        thread.core = core
        self._watch(core)
        self._go_on(core, thread)

    def _watch(self, core: _Core) -> None:
        """Somebody has the core, so the next visit is one that he may meet."""
        if core.visits is not None and not core.watched and core.visits.due < math.inf:
            core.watched = True
            self._clock.at(max(core.visits.due, self._clock.now), self._visited, core, core.visits)

    def _visited(self, core: _Core, visits: Comings) -> None:
        core.watched = False
        if not core.running:
            return  # nobody meets it
        self._visits_due(core, visits)
        self._watch(core)

    def _visits_due(self, core: _Core, visits: Comings) -> None:
        while visits.due <= self._clock.now:
            seconds = visits.seconds
            visits.take()
            self._visit(core, seconds)

    def _visit(self, core: _Core, seconds: float) -> None:
        thread = Thread(self)
        thread.core, thread.prompt = core, True
        thread.submit(seconds, 0.0, _nothing)

    def _catch_up(self, core: _Core, visits: Comings) -> None:
        """A core that had nothing to do had visits, and may have one now."""
        now = self._clock.now
        self.busy += visits.skip(now) / self.speed
        while visits.due <= now:
            begin = max(visits.due, core.visited)
            core.visited = begin + visits.seconds / self.speed
            visits.take()
            if core.visited > now:
                self.busy += now - begin
                visitor = Thread(self)
                visitor.prompt = True
                visitor.hold((core.visited - now) * self.speed)
                self._give(core, visitor)
                self._visits_due(core, visits)  # those came before whoever comes now
                return
            self.busy += core.visited - begin

    def _go_on(self, core: _Core, thread: Thread) -> None:
        """Run the thread's first job, or what its slice allows of it."""
        turn = left = thread.left
        if core.line or left > self.slice_s:
            turn = min(left, max(self.slice_s - core.used, 0.0))
        if thread.lock is not None and turn > SWITCH_S:
            turn = SWITCH_S
        self._clock.after(turn / self.speed, self._ended, core, thread, turn, core.stalls.until(self._clock.now))

    def _ended(self, core: _Core, thread: Thread, turn: float, stalled: float) -> None:
        now_stalled = core.stalls.until(self._clock.now)
        if now_stalled > stalled + 1e-12:
            self._clock.after(now_stalled - stalled, self._ended, core, thread, turn, now_stalled)
            return
        self.busy += turn / self.speed
        core.used += turn
        more = thread.did(turn)
        over = core.used >= self.slice_s - 1e-12
        lock = thread.lock
        following_lock = None if lock is None else lock.leave(thread, more, self._clock.now)
        if more and following_lock is not None:
            pass  # it waits for the lock, and its core is free
        elif more and over and core.line:
            core.line.append(thread)
        elif more:
            if over:
                core.used = 0.0
            self._go_on(core, thread)
            return
        thread.ran = self._clock.now
        core.running = False
        following = core.line.popleft() if core.line else self._cold()
        if following is not None:
            self._give(core, following)
        if following_lock is not None:
            self._place(following_lock)

    def _cold(self) -> Thread | None:
        """The first thread in a line of another core that may be moved."""
        before = self._clock.now - self.hot_s
        for core in self._cores:
            for thread in core.line:
                if thread.ran <= before:
                    core.line.remove(thread)
                    return thread
        return None


class _Core:
    """One core: whether a thread has it, how much of its slice that has used, who waits for it, and what disturbs it.

    Attributes:
        visits: of others, those that nobody has met yet.
        visited: until when those before had it.
        watched: an event is set for the next visit.
    """

    __slots__ = ("line", "running", "stalls", "used", "visited", "visits", "watched")

    def __init__(self) -> None:
        self.running = self.watched = False
        self.used = self.visited = 0.0
        self.line: deque[Thread] = deque()
        self.stalls = Stalls()
        self.visits: Comings | None = None


def _nothing() -> None:
    pass


def _length(core: _Core) -> int:
    return len(core.line)


class Thread:
    """One thread of a process: jobs in the order in which they came, one at a time, each on the host's processor.

    A thread that has nothing to do sleeps, and its caches are others' the longer the more. So the first job after a sleep
    costs more than one behind another: ``cold`` seconds, and what ``cooled`` says of the sleep.

    Args:
        lock: needed to run; None: none is.

    Attributes:
        core: that it had last, or has; None: it has never run.
        left: seconds of its first job; ``ran``: when it had a core last.
        prompt: it needs no time to wake up.
        rested: when it had last slept for a while.
        spent: seconds of its jobs so far, at speed 1.
    """

    __slots__ = (
        "_args",
        "_cooled",
        "_cpu",
        "_queue",
        "_run",
        "_running",
        "core",
        "left",
        "lock",
        "prompt",
        "ran",
        "rested",
        "spent",
    )

    def __init__(self, cpu: Cpu, cooled: Points = (), lock: Lock | None = None) -> None:
        self._cpu, self._cooled, self.lock = cpu, cooled, lock
        self.prompt, self.spent = False, 0.0
        self._queue: deque[tuple[float, _Run, tuple[Any, ...]]] = deque()
        self._running = False
        self._run: _Run | None = None
        self._args: tuple[Any, ...] = ()
        self.core: _Core | None = None
        self.left = 0.0
        self.ran = self.rested = -math.inf

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
            now = self._cpu.now
            if now - self.ran > REST_S:
                self.rested = now
            if self._cooled:
                cold += at_sleep(self._cooled, now - self.ran)
            self.left, self._run, self._args = seconds + cold, run, args
            self._cpu.wake(self)

    def hold(self, seconds: float) -> None:
        """Be at a job that nobody waits for, with so much of it left."""
        self._running, self.left, self._run = True, seconds, _nothing

    def next(self, seconds: float, run: _Run, *args: Any) -> None:
        """A job before those that wait; to be called while a job of this thread ends."""
        self._queue.appendleft((seconds, run, args))

    def steps(self, number: int, run: _Run, *args: Any) -> None:
        """``run(*args)`` after so many steps of an event loop, which cost nothing, but each waits for all that waits before it."""
        if number:
            self.submit(0.0, 0.0, self.steps, number - 1, run, *args)
        else:
            run(*args)

    def did(self, seconds: float) -> bool:
        """It has run for ``seconds``, which may end its job; whether it has more to do."""
        self.left -= seconds
        self.spent += seconds
        if self.left > 1e-15:
            return True
        run, args = self._run, self._args
        assert run is not None
        run(*args)
        while self._queue:
            self.left, self._run, self._args = self._queue.popleft()
            if self.left > 0.0:
                return True
            self._run(*self._args)
        self._running = False
        return False
