"""Queued requests, their number and the runs that they share: adaptive batching without a timer.

Each thread that receives requests (gRPC's thread, the event loop, the thread of the shards' answers) submits them, and calls
:meth:`Scheduler.run_ready` when it has no further request: at the end of its turn. Requests of one turn run together. So
a single request does not wait, and while many requests arrive, or runs take long, many share a run. Short runs are
computed on the calling thread, long runs on worker threads; requests that arrive while all of these are busy share the
next run.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from recinfer.errors import DeadlineError, OverloadedError
from recinfer.serving.engine.request import Request
from recinfer.serving.wire.limits import BatchConfig

__all__ = ["SHORT_S", "Entry", "QueueBudget", "Runner", "Scheduler", "SchedulerState"]

_log = logging.getLogger("recinfer.serving.server")

SHORT_S = 1e-3
"""Expected seconds up to which a run is computed on the thread that takes requests."""
_MOST_NEW = 128
"""A turn ends after this many requests, also while more arrive, which bounds the wait of the first. The value is uncritical:
with 32 callers, the rates of answers with 32, 128 and 512 differ by at most 3 %, and the rate with 8 is 20 % lower."""

_MARGIN = 1.5  # factor by which the real wait may exceed the estimate
_SMOOTHING = 0.2  # weight of the last run in the estimate of the next
_FULL, _TOO_LATE = "its limit", "more than its deadline allows"
_SAME_ERROR_S = 20e-3  # refusals within this time share an error object


class _Refusal(NamedTuple):
    """A refusal: whether the queue was full, its time (``time.monotonic()``) and its error."""

    full: bool | None
    at: float
    error: OverloadedError


_NONE_YET = _Refusal(None, -math.inf, OverloadedError(""))


class QueueBudget:
    """Counts queued requests. Any thread may call.

    Args:
        most: number of requests that may wait.
        at_a_time: number of runs, or of fan-outs to shard servers, that may be under way together.

    Attributes:
        waiting: number of queued requests.
    """

    def __init__(self, most: int, at_a_time: int) -> None:
        self._most = most
        self._at_a_time = at_a_time
        self.waiting = self.refusals = 0
        self._last = _NONE_YET
        self._lock = threading.Lock()
        self._seconds_a_request = 1e-3

    def enter(self) -> None:
        """Count one more queued request."""
        with self._lock:
            self.waiting += 1

    def leave(self, requests: int) -> None:
        """Count ``requests`` queued requests fewer."""
        with self._lock:
            self.waiting -= requests

    def admit(self, deadline: float) -> None:
        """Raise OverloadedError, and count a refusal, if a request that arrives now cannot be queued, or would be
        answered after its ``deadline`` (of ``time.monotonic()``): a late request would take the run of another whose
        client still waits.
        """
        if (error := self.refused(deadline)) is not None:
            raise error

    def refused(self, deadline: float) -> OverloadedError | None:
        """The error for a request that cannot be queued now; it is counted as refused. None: it can be queued.

        Requests of the same few milliseconds get the same error object: a message of its own for each would be a fifth of the
        cost of a refusal.
        """
        waiting = self.waiting
        if not waiting:
            return None
        now, full = time.monotonic(), waiting >= self._most
        if not full and now + _MARGIN * self._expected_wait() <= deadline:
            return None
        with self._lock:
            self.refusals += 1
            last = self._last
            if last.full is not full or now - last.at > _SAME_ERROR_S:
                last = self._last = _Refusal(full, now, self._error(_FULL if full else _TOO_LATE))
        return last.error

    def record_run(self, seconds: float, requests: int) -> None:
        """Record the duration of a run of ``requests`` requests."""
        with self._lock:
            self._seconds_a_request += _SMOOTHING * (seconds / requests - self._seconds_a_request)

    def _expected_wait(self) -> float:
        return self.waiting * self._seconds_a_request / self._at_a_time

    def _error(self, why: str) -> OverloadedError:
        seconds = max(0.001, self._expected_wait())
        return OverloadedError(
            f"the server has {self.waiting} requests waiting, {why}; try again in {seconds * 1e3:.0f} ms",
            retry_after=seconds,
        )


class Entry:
    """A queued request.

    Args:
        request: the request to answer.
        key: entries of one runner and equal keys may share a run.
        samples: samples that the entry adds to a run.
        work: data of the request for the runner.
    """

    __slots__ = ("key", "notified", "request", "samples", "since", "work")

    def __init__(self, request: Request, key: Hashable, samples: int, work: Any = None) -> None:
        self.request = request
        self.key = key
        self.samples = samples
        self.work = work
        self.since = 0.0
        self.notified = False  # whether its request was notified that it waits


class Runner(Protocol):
    """Runs entries of one kind. ``run`` is called on a worker, or for a short run on the thread that called
    :meth:`Scheduler.run_ready`; the other methods on either, with the scheduler's lock, so they return at once."""

    def can_start(self) -> bool:
        """Whether a further run may begin now."""
        ...

    def may_share(self, entry: Entry, samples: int) -> bool:
        """Whether ``entry`` may be added to a run that then has ``samples`` samples."""
        ...

    def seconds(self, entry: Entry, samples: int, threads: int) -> float:
        """Expected seconds of a run of ``samples`` samples like ``entry`` on ``threads`` threads; infinite: a worker thread
        computes the run, however short it is."""
        ...

    def run(self, entries: Sequence[Entry], threads: int) -> None:
        """Answer entries of one key, now or later; ``threads``: number of idle threads, the calling thread included."""
        ...


@dataclass(frozen=True)
class SchedulerState:
    """Counts of queued requests and of current and past runs, for metrics."""

    waiting: int
    running: int
    runs: int
    requests: int
    samples: int
    expired: int
    refused: int


class _Run(NamedTuple):
    runner: Runner
    entries: list[Entry]
    threads: int
    is_short: bool


class Scheduler:
    """Queues requests and starts their runs. Any thread may call.

    Args:
        config: the bounds of the queue and of merged runs.
        threads: number of worker threads for long runs.
        at_a_time: see recinfer.serving.engine.scheduler.QueueBudget.
        waited: called with the seconds that each request has waited for its run.

    Attributes:
        queue: counts queued requests.
        workers: the threads for long runs.
        has_new: whether an entry was submitted since the last :meth:`run_ready` began.
    """

    def __init__(
        self,
        config: BatchConfig,
        threads: int,
        at_a_time: int | None = None,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.config = config
        self._threads = threads
        self._waited = waited
        self.queue = QueueBudget(config.max_queue, at_a_time or threads)
        self.workers = ThreadPoolExecutor(threads, thread_name_prefix="recinfer-work")
        self._lanes: OrderedDict[tuple[Runner, Hashable], deque[Entry]] = OrderedDict()
        self._lock = threading.Lock()
        self._new = self._new_samples = 0
        self._busy = self._under_way = 0
        self._requests_s = self._under_way_s = 0.0
        self._counted_at = time.monotonic()
        self._runs = self._requests = self._samples = self._expired = 0

    def close(self) -> None:
        """End the worker threads; call this after the last request."""
        self.workers.shutdown(wait=False, cancel_futures=True)

    @property
    def state(self) -> SchedulerState:
        """The current counts."""
        running = self._busy + self._under_way
        return SchedulerState(
            self.queue.waiting,
            running,
            self._runs,
            self._requests,
            self._samples,
            self._expired,
            self.queue.refusals,
        )

    @property
    def occupied_s(self) -> tuple[float, float]:
        """The seconds of all requests that were run, from their arrival to the end of their runs, and of all operations between
        :meth:`begin` and :meth:`done`. The growth of either over a time, divided by the time, is the mean number in flight."""
        with self._lock:
            self._count_seconds()
            return self._requests_s, self._under_way_s

    @property
    def has_new(self) -> bool:
        """Whether an entry was submitted since the last :meth:`run_ready`."""
        return self._new > 0

    @property
    def is_due(self) -> bool:
        """Whether a turn should end, by the number of entries and samples since the last :meth:`run_ready`."""
        return self._new >= _MOST_NEW or self._new_samples >= self.config.max_batch

    def check_deadline(self, deadline: float) -> None:
        """Raise DeadlineError, and count it, if ``time.monotonic()`` has reached ``deadline``."""
        if time.monotonic() >= deadline:
            with self._lock:
                self._expired += 1
            raise DeadlineError("the deadline had passed when the request arrived; it was not run")

    def submit(self, runner: Runner, entry: Entry) -> None:
        """Queue ``entry``; the caller calls :meth:`run_ready` when it has no further request."""
        entry.since = time.monotonic()
        with self._lock:
            lane = self._lanes.get((runner, entry.key))
            if lane is None:
                lane = self._lanes[runner, entry.key] = deque()
            lane.append(entry)
            self._new += 1
            self._new_samples += entry.samples
        self.queue.enter()

    def forget(self, request: Request) -> None:
        """Drop a request whose client has disconnected, and free its place in the queue unless its run has begun."""
        request.drop()
        with self._lock:
            for key, lane in self._lanes.items():
                for entry in lane:
                    if entry.request is request:
                        lane.remove(entry)
                        if not lane:
                            del self._lanes[key]
                        self.queue.leave(1)
                        return

    def run_ready(self) -> None:
        """Run queued requests: short runs here, long ones on free workers. The rest waits for a worker."""
        while True:
            with self._lock:
                self._new = self._new_samples = 0
                run, late = self._next()
            for entry in late:
                entry.request.reply(DeadlineError("the deadline passed while the request waited; it was not run"))
            if run is None:
                break
            if run.is_short:
                self._run(run)
            else:
                self.on_worker(functools.partial(self._work, run))
        if self.queue.waiting:
            self._notify_waiting()

    def on_worker(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a worker thread; ``work`` is dropped once the server has stopped."""
        with suppress(RuntimeError):
            self.workers.submit(work)

    def begin(self) -> None:
        """Begin an operation that takes no thread while it waits; :meth:`done` ends it."""
        with self._lock:
            self._count_seconds()
            self._under_way += 1

    def done(self, requests: int, samples: int, seconds: float) -> None:
        """End an operation that took ``seconds``; 0 requests records no run."""
        with self._lock:
            self._count_seconds()
            self._under_way -= 1
        if requests:
            self.count(requests, samples)
            self.queue.record_run(seconds, requests)

    def count(self, requests: int, samples: int) -> None:
        """Count a run of ``requests`` requests with ``samples`` samples in all."""
        with self._lock:
            self._runs += 1
            self._requests += requests
            self._samples += samples

    def _count_seconds(self) -> None:
        """Add the seconds of the operations since the last change of their number; the lock is held."""
        now = time.monotonic()
        self._under_way_s += self._under_way * (now - self._counted_at)
        self._counted_at = now

    # -- the next run; the lock is held

    def _next(self) -> tuple[_Run | None, list[Entry]]:
        """The next run, and the entries whose deadline has passed."""
        for key, lane in self._lanes.items():
            runner = key[0]
            if not runner.can_start():
                continue
            count, samples = self._fitting(runner, lane)
            is_alone = not self._busy and count == self.queue.waiting
            threads = self._threads if is_alone else 1
            is_short = runner.seconds(lane[0], samples, threads) <= SHORT_S
            if not is_short and self._busy >= self._threads:
                continue
            taken, now = [lane.popleft() for _ in range(count)], time.monotonic()
            if lane:
                self._lanes.move_to_end(key)  # the other lanes come first
            else:
                del self._lanes[key]
            self.queue.leave(count)
            late = [entry for entry in taken if entry.request.deadline <= now]
            self._expired += len(late)
            if late:
                taken = [entry for entry in taken if entry.request.deadline > now]
            if not is_short:
                self._busy += 1
            return _Run(runner, taken, threads, is_short), late
        return None, []

    def _fitting(self, runner: Runner, lane: deque[Entry]) -> tuple[int, int]:
        """The number of the oldest entries that share the next run, and of their samples."""
        count, samples = 1, lane[0].samples
        for entry in islice(lane, 1, None):
            total = samples + entry.samples
            if total > self.config.max_batch or not runner.may_share(entry, total):
                break
            count, samples = count + 1, total
        return count, samples

    # -- runs

    def _work(self, run: _Run) -> None:
        """Compute a long run on a worker thread, then start further runs."""
        try:
            self._run(run)
        finally:
            with self._lock:
                self._busy -= 1
        self.run_ready()

    def _run(self, run: _Run) -> None:
        if not run.entries:
            return
        now, all_s = time.monotonic(), 0.0
        for entry in run.entries:
            self._waited(waited := now - entry.since)
            all_s += waited
        try:
            run.runner.run(run.entries, run.threads)
        except Exception as error:  # a bug of recinfer: requests without an answer get the error
            _log.exception("a run of %d requests failed", len(run.entries))
            for entry in run.entries:
                entry.request.reply(error)
        all_s += len(run.entries) * (time.monotonic() - now)
        with self._lock:
            self._requests_s += all_s

    def _notify_waiting(self) -> None:
        """Notify each request that has to wait for a thread, once."""
        waiting: list[Request] = []
        with self._lock:
            for lane in self._lanes.values():
                for entry in reversed(lane):
                    if entry.notified:
                        break
                    entry.notified = True
                    waiting.append(entry.request)
        for request in waiting:
            if request.waits is not None:
                request.waits()
