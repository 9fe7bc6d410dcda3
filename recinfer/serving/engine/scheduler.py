"""Merges waiting requests into runs: a bounded queue, a lane for each kind of run, and no wait for a request alone.

gRPC hands requests over one at a time, each some 100 us of its own work after the last, so what is about to come cannot
be seen. It is learned instead (recinfer.serving.engine.pace): how many requests came together lately, and so how many a run waits for.

Everything but the runs themselves happens on one event loop; only what :meth:`Batcher.went_straight` and the like share with
it, as they may be called from gRPC's thread, is guarded by a lock.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from recinfer.errors import ConfigError, DeadlineError
from recinfer.serving.engine.pace import BUSY_S, Crowd, Pace, most_away
from recinfer.serving.engine.queue_budget import Room
from recinfer.serving.engine.run_times import RunTimes

__all__ = ["BatchConfig", "Batcher", "BatcherState", "Runnable"]

_INLINE_BYTES = 32 << 10
_INLINE_S = 1e-3
_GAP_S = 1e-3
_RUNS_AWAY = 64  # that wait for other hosts at a time


@dataclass(frozen=True)
class BatchConfig:
    """How requests share runs.

    Attributes:
        max_batch: samples in a merged run; a single request may have more, and then runs on its own.
        max_delay_us: microseconds that a request may wait for others while requests come several at a time, and at most
            a millisecond for the next one; 0: no wait beyond the one for a run to end. While they come one by one, one
            in 256 waits, to see whether others come.
        max_queue: requests that may wait; one more is refused at once.
        max_queue_bytes: bytes of the requests that may wait.
    """

    max_batch: int = 1024
    max_delay_us: int = 4000
    max_queue: int = 512
    max_queue_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for item in fields(self):
            value, low = getattr(self, item.name), 0 if item.name == "max_delay_us" else 1
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 31:
                raise ConfigError(f"batching: {item.name}: got {value!r}, expected an integer from {low} to 2^31 - 1")


class Runnable(Protocol):
    """One decoded request.

    Attributes:
        lane: requests of the same lane may share a run.
        samples: size of its batch.
        bytes: size of its message.
    """

    @property
    def lane(self) -> Any: ...
    @property
    def samples(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class BatcherState:
    """What the batcher does now, and did: for metrics."""

    waiting: int
    running: int
    runs: int
    requests: int
    samples: int
    expired: int
    refused: int


@dataclass(eq=False)
class _Waiting:
    work: Runnable
    future: asyncio.Future[Any]
    deadline: float
    since: float


@dataclass(frozen=True)
class _One:
    """A request of one sample, where nothing else of it is asked for."""

    lane: Any = None
    samples: int = 1
    bytes: int = 0


_ONE = _One()


class Batcher:
    """Answers requests through ``run``, several at a time.

    Args:
        run: gives for each request of one lane its answer, or an exception in its place; called on the loop for short
            runs and in ``executor`` for long ones.
        executor: threads for long runs; ``threads`` of them at a time.
        config: the bounds.
        waited: told the seconds that each request of a run had waited for it.
        run_later: used instead of ``run`` where runs wait for other hosts: takes works, the ``time.monotonic()`` after
            which none of them is waited for, and whether they compute long. Many such runs are under way at a time.

    Attributes:
        room: for requests that wait.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        executor: Executor,
        threads: int,
        config: BatchConfig | None = None,
        waited: Callable[[float], None] = lambda seconds: None,
        run_later: Callable[..., Awaitable[Sequence[Any]]] | None = None,
    ) -> None:
        self.config = config or BatchConfig()
        self._waited = waited
        self._run, self._executor, self._threads = run, executor, threads
        self._run_later = run_later
        if run_later is not None:
            self._threads = _RUNS_AWAY
        self.room = Room(self.config.max_queue, self.config.max_queue_bytes, self._threads)
        self._lanes: OrderedDict[Any, deque[_Waiting]] = OrderedDict()
        self._times = RunTimes()
        self._running = 0
        self._away = 0  # runs by their callers, on other threads or hosts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_set: asyncio.Handle | None = None
        self._hold: asyncio.TimerHandle | None = None
        self._latest = self._hold_until = 0.0
        self._pace, self._crowds = Pace(), (Crowd(), Crowd())
        self._lock = threading.Lock()
        self._runs = self._requests = self._samples = self._expired = 0

    @property
    def state(self) -> BatcherState:
        """Figures of this moment."""
        return BatcherState(
            self.room.waiting,
            self._running + self._away,
            self._runs,
            self._requests,
            self._samples,
            self._expired,
            self.room.refusals,
        )

    def check_deadline(self, deadline: float) -> float:
        """``time.monotonic()``; raises DeadlineError when that is behind ``deadline``."""
        now = time.monotonic()
        if now >= deadline:
            with self._lock:
                self._expired += 1
            raise DeadlineError("the deadline had passed when the request arrived; it was not run")
        return now

    def may_go_straight(self, lane: Any, num_bytes: int) -> bool:
        """Whether a request of one sample may be run by its caller, now: nothing else is there, and it is short.

        It is told to :meth:`went_straight` when it was. Any thread may ask: at worst a request that came meanwhile is not
        waited with.
        """
        if self.room.queued or self._running or self._run_later is not None or num_bytes > _INLINE_BYTES:
            return False
        if self.config.max_delay_us and not self._pace.is_alone:
            return False
        return self._times.expected(lane, 1) <= _INLINE_S

    def is_known_short(self, lane: Any, samples: int, parts: int) -> bool:
        """Whether a run on as many threads as it has parts would not hold its caller's thread too long; not before one was seen."""
        return 0 < self._times.expected(lane, samples) <= _INLINE_S * parts

    def went_straight(self, lane: Any, seconds: float, cost: float) -> None:
        """A request of one sample was run by its caller, on any thread, in ``seconds``, ``cost`` of them of its own."""
        self._goes_alone()
        self._done(lane, (_ONE,), seconds, cost)

    def _goes_alone(self) -> bool:
        with self._lock:
            return self._pace.goes_alone()

    def may_go_away(self, most: int = 1, busy_s: float = 0.0, mixes: bool = False) -> bool:
        """Whether a request may be run by its caller, on another thread or other hosts, within :meth:`away`: no run has
        begun or is waited for, and fewer than ``most`` are away; with 1, nothing is there that it could share a run with,
        nor is it to be seen whether something is. Any thread may ask. Where one that asks with more would be too many, those of
        the next moment may not either: see :class:`recinfer.serving.engine.pace.Crowd`.

        Args:
            busy_s: for how long the thread that takes requests has had no rest.
            mixes: it may be while others share runs or wait for one too, but with 1; see recinfer.serving.engine.pace.gains_nothing.
        """
        if (self.room.queued or self._running) and (most == 1 or not mixes):
            return False
        if most == 1:
            return not self._away and (not self.config.max_delay_us or self._pace.is_alone)
        now, crowd = time.monotonic(), self._crowds[mixes]
        if crowd.is_there(now):
            return False
        if self._away < most and busy_s < BUSY_S:
            return True
        with self._lock:
            crowd.too_many(now)
        return False

    def most_away(self, lane: Any, samples: int, questions: int, num_bytes: int) -> int:
        """How many requests like this may be away at a time that ask other hosts so many questions."""
        return most_away(questions, self._times.expected(lane, samples), num_bytes)

    @contextmanager
    def away(self, lane: Any, samples: int) -> Iterator[None]:
        """A run by its caller that waits for other hosts."""
        back = self.goes_away(lane)
        try:
            yield
        finally:
            back(samples, 0.0)

    def goes_away(self, lane: Any, alone: bool = True) -> Callable[[int, float], None]:
        """A run by its caller on another thread, or that waits for other hosts. Call what is returned when it is over, with
        its samples, 0 where it did not come about, and its own seconds, 0 where nobody measured them. On any thread, both.

        Args:
            alone: others may not be away meanwhile, so that it is learned whether they would come.
        """
        start = time.monotonic()
        with self._lock:
            if alone:
                self._pace.goes_alone()
            self._away += 1

        def back(samples: int, cost: float) -> None:
            with self._lock:
                self._away -= 1
            if samples:
                self._done(lane, (_One(samples=samples),), time.monotonic() - start, cost)
            if self.room.queued and self._loop is not None:
                self._loop.call_soon_threadsafe(self._flush_if_any)

        return back

    def _flush_if_any(self) -> None:
        if self.room.queued:
            self._flush_soon()

    def count(self, samples: int) -> None:
        """A request was answered without the queue, on any thread."""
        with self._lock:
            self._runs += 1
            self._requests += 1
            self._samples += samples

    async def submit(self, work: Runnable, deadline: float = float("inf")) -> Any:
        """The answer to ``work``; raises what its run raised.

        Args:
            deadline: ``time.monotonic()`` after which nobody waits for the answer: then it is not run.

        Raises:
            OverloadedError: the queue is full, or so long that the deadline would pass first.
            DeadlineError: its deadline passed while it waited.
        """
        now = self.check_deadline(deadline)
        found_idle = not (self.room.queued or self._running or self._away)
        alone = found_idle and (not self.config.max_delay_us or self._goes_alone())
        if alone and self._run_later is not None:
            return await self._straight_later(work, deadline, now)
        if alone and self._is_short(work):
            return self._straight(work)
        self.room.admit(work.bytes)
        self.room.check_wait(now, deadline)
        self._loop = asyncio.get_running_loop()
        entry = _Waiting(work, self._loop.create_future(), deadline, now)
        self._lanes.setdefault(work.lane, deque()).append(entry)
        self.room.enter(work.bytes)
        if alone or not self.config.max_delay_us:
            self._flush_soon()
        elif self.room.queued >= self._pace.target:
            if self._flush_set is None and self._running < self._threads:
                with self._lock:
                    self._pace.reached()
            self._flush_soon()
        else:
            self._wait_for_more(now)
        try:
            return await entry.future
        except asyncio.CancelledError:
            self._forget(entry)
            raise

    def _straight(self, work: Runnable) -> Any:
        start = time.monotonic()
        (answer,), cost = self._measured([work])
        self._done(work.lane, [work], time.monotonic() - start, cost)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _straight_later(self, work: Runnable, deadline: float, start: float) -> Any:
        assert self._run_later is not None
        self._running += 1
        try:
            (answer,) = await self._run_later([work], deadline, long=work.bytes > _INLINE_BYTES)
        finally:
            self._running -= 1
            self._done(work.lane, [work], time.monotonic() - start, 0.0)
            if self.room.queued:
                self._flush_soon()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _is_short(self, work: Runnable) -> bool:
        return (
            self._run_later is None
            and work.bytes <= _INLINE_BYTES
            and self._times.expected(work.lane, work.samples) <= _INLINE_S
        )

    def _wait_for_more(self, now: float) -> None:
        """Run what waits once nobody has come for a while; called when somebody came."""
        self._latest = now
        if self._hold is None and self._running < self._threads:
            self._hold_until = now + self.config.max_delay_us / 1e6
            self._hold_for(min(_GAP_S, self._hold_until - now))

    def _hold_for(self, seconds: float) -> None:
        self._hold = asyncio.get_running_loop().call_later(seconds, self._waited_enough)

    def _waited_enough(self) -> None:
        self._hold = None
        if self._running >= self._threads:  # the end of a run is waited for
            return
        left = min(self._latest + _GAP_S, self._hold_until) - time.monotonic()
        if self.room.queued and left > 0:
            self._hold_for(left)
            return
        if self._flush_set is None:
            with self._lock:
                self._pace.missed(self.room.queued)
        self._flush()

    def _flush_soon(self) -> None:
        if self._flush_set is None and self._running < self._threads:
            # After what else arrived in this turn of the loop.
            self._flush_set = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_set is not None:
            self._flush_set.cancel()
            self._flush_set = None
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        while self.room.queued and self._running < self._threads:
            batch = self._next()
            if batch:
                self._start(batch)

    def _next(self) -> list[_Waiting]:
        """The oldest requests of the lane whose turn it is, as many as fit."""
        key, lane = next(iter(self._lanes.items()))
        batch: list[_Waiting] = []
        samples, now = 0, time.monotonic()
        while lane:
            entry = lane[0]
            total = samples + entry.work.samples
            if batch and (total > self.config.max_batch or not self._times.may_share(key, total)):
                break
            lane.popleft()
            self.room.leave(entry.work.bytes)
            if entry.future.done():
                continue
            if now >= entry.deadline:
                with self._lock:
                    self._expired += 1
                entry.future.set_exception(
                    DeadlineError("the deadline passed while the request waited; it was not run")
                )
                continue
            batch.append(entry)
            samples += entry.work.samples
        if lane:
            self._lanes.move_to_end(key)  # the other lanes first
        else:
            del self._lanes[key]
        return batch

    def _start(self, batch: list[_Waiting]) -> None:
        works = [entry.work for entry in batch]
        lane, start = works[0].lane, time.monotonic()
        for entry in batch:
            self._waited(start - entry.since)
        samples, num_bytes = sum(work.samples for work in works), sum(work.bytes for work in works)
        if self._run_later is not None:
            self._running += 1
            until = max(entry.deadline for entry in batch)
            away = asyncio.ensure_future(self._run_later(works, until, long=num_bytes > _INLINE_BYTES))
            away.add_done_callback(functools.partial(self._came_back, batch, works, start))
            return
        if num_bytes <= _INLINE_BYTES and self._times.expected(lane, samples) <= _INLINE_S:
            answers, cost = self._measured(works)
            self._deliver(batch, answers)
            self._done(lane, works, time.monotonic() - start, cost)
            return
        self._running += 1
        running = asyncio.get_running_loop().run_in_executor(self._executor, self._measured, works)

        def finished(future: asyncio.Future[Any]) -> None:
            self._running -= 1
            if future.cancelled():  # the server stops
                answers, cost = [asyncio.CancelledError()] * len(works), 0.0
            else:
                answers, cost = future.result()
            self._deliver(batch, answers)
            self._done(lane, works, time.monotonic() - start, cost)
            if self.room.queued:
                self._flush_soon()

        running.add_done_callback(finished)

    def _came_back(
        self, batch: list[_Waiting], works: Sequence[Runnable], start: float, away: asyncio.Future[Sequence[Any]]
    ) -> None:
        self._running -= 1
        if away.cancelled():  # the server stops
            answers: Sequence[Any] = [asyncio.CancelledError()] * len(works)
        else:
            error = away.exception()
            answers = away.result() if error is None else [error] * len(works)
        self._deliver(batch, answers)
        self._done(works[0].lane, works, time.monotonic() - start, 0.0)
        if self.room.queued:
            self._flush_soon()

    def _measured(self, works: Sequence[Any]) -> tuple[Sequence[Any], float]:
        """The answers, and this thread's own seconds: what others do on the machine makes no run a long one."""
        start = time.thread_time()
        try:
            answers = self._run(works)
        except Exception as error:
            answers = [error] * len(works)
        return answers, time.thread_time() - start

    def _deliver(self, batch: list[_Waiting], answers: Sequence[Any]) -> None:
        for entry, answer in zip(batch, answers, strict=True):
            if entry.future.done():
                continue
            if isinstance(answer, BaseException):
                entry.future.set_exception(answer)
            else:
                entry.future.set_result(answer)

    def _done(self, lane: Any, works: Sequence[Runnable], seconds: float, cost: float) -> None:
        samples = sum(work.samples for work in works)
        with self._lock:
            self._runs += 1
            self._requests += len(works)
            self._samples += samples
            if cost:
                self._times.learn(lane, samples, cost)
        self.room.took(seconds, len(works))

    def _forget(self, entry: _Waiting) -> None:
        """A caller went away: free its place, unless its run has begun."""
        lane = self._lanes.get(entry.work.lane)
        if lane is not None and entry in lane:
            lane.remove(entry)
            self.room.leave(entry.work.bytes)
            if not lane:
                del self._lanes[entry.work.lane]
