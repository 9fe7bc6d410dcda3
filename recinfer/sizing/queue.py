"""The server's queue in simulated time: the rules of recinfer.serving.batcher, with its own room, constants and learning."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from recinfer.errors import OverloadedError
from recinfer.serving import batcher as rules
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.pace import BUSY_S, Crowd, Pace, most_away
from recinfer.serving.room import Room
from recinfer.serving.run_times import RunTimes
from recinfer.sizing.clock import Clock, Cpu, Thread

__all__ = ["Queue", "Work"]


class Work:
    """One request at one server.

    Attributes:
        samples: of its batch.
        num_bytes: of its message.
        answered: called with the work once its answer (or None: it was refused) is there, on the loop.
        tag: whatever the caller needs then.
        deadline: simulated time after which nobody waits.
        refused: why there is no answer: ``"full"``, ``"late"`` or ``"expired"``; empty when there is one.
        straight: whether it was run at once, in the turn of the loop that it came in.
    """

    __slots__ = ("answered", "counts_as", "deadline", "num_bytes", "refused", "samples", "straight", "tag")

    def __init__(
        self,
        samples: int,
        num_bytes: float,
        answered: Callable[[Work], object],
        tag: Any = None,
        deadline: float = math.inf,
    ) -> None:
        self.samples, self.num_bytes = samples, num_bytes
        self.answered, self.tag, self.deadline = answered, tag, deadline
        self.refused = ""
        self.straight = False
        # A small message is not decoded before its run, so the queue takes it for one sample.
        self.counts_as = samples if num_bytes > rules._INLINE_BYTES else 1


class Queue:
    """Works to runs: ``submit`` is called on the loop, runs are on it when short and on threads of their own when not.

    It follows :class:`recinfer.serving.batcher.Batcher` rule by rule for one lane, the usual case: a server of one model
    and one kind of call.

    Args:
        cost: CPU seconds of a run of these works.
        threads: runs at a time.
        away: does a run instead, where runs wait for other hosts: takes the works, and what to call on the loop once it is over.
    """

    __slots__ = (
        "_away",
        "_away_now",
        "_cost",
        "_cpu",
        "_crowds",
        "_ended",
        "_flush_set",
        "_hold",
        "_hold_until",
        "_latest",
        "_loop",
        "_lost",
        "_pace",
        "_room",
        "_running",
        "_threads",
        "_times",
        "_waiting",
        "clock",
        "config",
        "refused",
        "requests",
        "runs",
    )

    def __init__(
        self,
        clock: Clock,
        cpu: Cpu,
        loop: Thread,
        config: BatchConfig,
        cost: Callable[[Sequence[Work]], float],
        threads: int = 1,
        away: Callable[[list[Work], Callable[[], None]], None] | None = None,
    ) -> None:
        self.clock, self.config, self._away = clock, config, away
        self._cpu, self._loop, self._cost, self._threads = cpu, loop, cost, threads
        self._waiting: deque[Work] = deque()
        self._room = Room(config.max_queue, config.max_queue_bytes, threads)
        self._running = 0
        self._away_now = 0  # of those that are run by their callers
        self._pace, self._crowds = Pace(), (Crowd(), Crowd())
        self._times = RunTimes()
        self._ended: list[Work] = []
        self._flush_set = False
        self._hold = 0  # number of the timer that counts; those set before it do not
        self._lost = 0
        self._latest = self._hold_until = 0.0
        self.runs = self.requests = self.refused = 0

    # ------------------------------------------------------------- coming in

    def admits(self, num_bytes: float) -> bool:
        """Whether there is room for a message."""
        try:
            self._room.admit(int(num_bytes))
        except OverloadedError:
            return False
        return True

    def may_go_straight(self, work: Work) -> bool:
        """Whether a small request may be run by its caller, now: nothing else is there, and it is short."""
        if not self.may_go_away() or self._away is not None or work.num_bytes > rules._INLINE_BYTES:
            return False
        return self._times.expected(None, 1) <= rules._INLINE_S

    def went_straight(self, seconds: float) -> None:
        """One was."""
        self._pace.goes_alone()
        self._learned(1, 1, seconds, seconds)

    def may_go_away(self, most: int = 1, busy_s: float = 0.0, mixes: bool = False) -> bool:
        """Whether a small request may be run by its caller, within :meth:`begins_away` and :meth:`ends_away`; ``mixes``: while
        others share runs, too."""
        if (self._waiting or self._running) and (most == 1 or not mixes):
            return False
        if most == 1:
            return not self._away_now and (not self.config.max_delay_us or self._pace.is_alone)
        now, crowd = self.clock.now, self._crowds[mixes]
        if crowd.is_there(now):
            return False
        if self._away_now < most and busy_s < BUSY_S:
            return True
        crowd.too_many(now)
        return False

    def most_away(self, work: Work, questions: int) -> int:
        """How many such requests may be away at a time."""
        return most_away(questions, self._times.expected(None, work.samples), int(work.num_bytes))

    def begins_away(self, alone: bool) -> None:
        """A run by its caller that waits for other hosts; ``alone``: others may not be away meanwhile."""
        if alone:
            self._pace.goes_alone()
        self._away_now += 1

    def ends_away(self, since: float, samples: int, seconds: float) -> None:
        """It is over, having computed so long; on any thread."""
        self._away_now -= 1
        self.runs += 1
        self.requests += 1
        if seconds:
            self._times.learn(None, samples, seconds)
        self._room.took(self.clock.now - since, 1)
        if self._waiting:
            self._loop.submit(0.0, 0.0, self._flush_if_any)

    def _flush_if_any(self) -> None:
        if self._waiting:
            self._flush_soon()

    def submit(self, work: Work) -> None:
        """Called at the end of a job of the loop."""
        now, config = self.clock.now, self.config
        if now >= work.deadline:
            self._refuse(work, "expired")
            return
        idle = not (self._waiting or self._running or self._away_now)
        alone = idle and (not config.max_delay_us or self._pace.goes_alone())
        short = self._away is None and work.num_bytes <= rules._INLINE_BYTES
        if alone and short and self._times.expected(None, work.counts_as) <= rules._INLINE_S:
            work.straight = True
            seconds = self._cost((work,))
            self._loop.next(seconds, self._over_on_loop, [work], now, seconds)
            return
        if not self.admits(work.num_bytes):
            self._refuse(work, "full")
            return
        try:
            self._room.check_wait(now, work.deadline)
        except OverloadedError:
            self._refuse(work, "late")
            return
        self._waiting.append(work)
        self._room.enter(int(work.num_bytes))
        if alone or not config.max_delay_us:
            self._flush_soon()
        elif len(self._waiting) >= self._pace.target:
            if not self._flush_set and self._running < self._threads:
                self._pace.reached()
            self._flush_soon()
        else:
            self._wait_for_more(now)

    def _refuse(self, work: Work, why: str) -> None:
        self.refused += 1
        work.refused = why
        work.answered(work)

    # ------------------------------------------------------ waiting for more

    def _wait_for_more(self, now: float) -> None:
        self._latest = now
        if not self._hold and self._running < self._threads:
            self._hold_until = now + self.config.max_delay_us / 1e6
            self._hold_for(min(rules._GAP_S, self._hold_until - now))

    def _hold_for(self, seconds: float) -> None:
        self._lost += 1
        self._hold = self._lost
        self.clock.after(seconds, self._rings, self._hold)

    def _rings(self, timer: int) -> None:
        if timer == self._hold:
            self._loop.submit(0.0, 0.0, self._waited_enough, timer)

    def _waited_enough(self, timer: int) -> None:
        if timer != self._hold:
            return
        self._hold = 0
        if self._running >= self._threads:
            return
        now = self.clock.now
        left = min(self._latest + rules._GAP_S, self._hold_until) - now
        if self._waiting and left > 1e-12:
            self._hold_for(left)
            return
        if not self._flush_set:
            self._pace.missed(len(self._waiting))
        self._flush()

    def _flush_soon(self) -> None:
        if not self._flush_set and self._running < self._threads:
            self._flush_set = True
            self._loop.submit(0.0, 0.0, self._flush_if_set)  # after what else arrived in this turn of the loop

    def _flush_if_set(self) -> None:
        if self._flush_set:
            self._flush()

    def _flush(self) -> None:
        self._flush_set = False
        self._hold = 0
        while self._waiting and self._running < self._threads:
            batch = self._next()
            if batch and not self._start(batch):
                return  # it goes on once this run is over
        self._deliver()

    def _deliver(self) -> None:
        """The answers of runs on the loop are sent once all runs of a flush are over."""
        ended, self._ended = self._ended, []
        for work in ended:
            work.answered(work)

    def _next(self) -> list[Work]:
        batch: list[Work] = []
        samples, now, waiting = 0, self.clock.now, self._waiting
        while waiting:
            work = waiting[0]
            total = samples + work.counts_as
            if batch and (total > self.config.max_batch or not self._times.may_share(None, total)):
                break
            waiting.popleft()
            self._room.leave(int(work.num_bytes))
            if now >= work.deadline:
                self._refuse(work, "expired")
                continue
            batch.append(work)
            samples = total
        return batch

    # ------------------------------------------------------------------ runs

    def _start(self, batch: list[Work]) -> bool:
        """Begin a run; False when it is on the loop, so that the next one has to wait for its end."""
        start = self.clock.now
        if self._away is not None:
            self._running += 1
            self._away(batch, lambda: self._over_elsewhere(batch, start, 0.0))
            return True
        short = self._times.expected(None, sum(work.counts_as for work in batch)) <= rules._INLINE_S
        on_loop = short and sum(work.num_bytes for work in batch) <= rules._INLINE_BYTES
        seconds = self._cost(batch)
        if on_loop:
            self._loop.next(seconds, self._over_on_loop, batch, start, seconds)
            return False
        self._running += 1
        self._cpu.start(seconds, self._over_on_thread, batch, start, seconds)
        return True

    def _over_on_loop(self, batch: list[Work], start: float, seconds: float) -> None:
        self._learn(batch, start, seconds)
        self._ended += batch
        if batch[0].straight:
            self._deliver()
        else:
            self._flush()

    def _over_on_thread(self, batch: list[Work], start: float, seconds: float) -> None:
        # The loop hears of it when it comes to it.
        self._loop.submit(0.0, 0.0, self._over_elsewhere, batch, start, seconds)

    def _over_elsewhere(self, batch: list[Work], start: float, seconds: float) -> None:
        self._running -= 1
        self._learn(batch, start, seconds)
        for work in batch:
            work.answered(work)
        if self._waiting:
            self._flush_soon()

    def _learn(self, batch: Sequence[Work], start: float, seconds: float) -> None:
        self.runs += 1
        self.requests += len(batch)
        self._learned(len(batch), sum(work.counts_as for work in batch), seconds, self.clock.now - start)

    def _learned(self, requests: int, samples: int, seconds: float, wall: float) -> None:
        self._times.learn(None, samples, seconds)
        self._room.took(wall, requests)
