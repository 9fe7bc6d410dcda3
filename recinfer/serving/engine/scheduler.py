"""Queued requests and the runs that they share: adaptive batching without a timer.

Each thread that receives requests (gRPC's thread, the event loop, the thread of the shards' answers) submits them, and calls
:meth:`Scheduler.run_ready` when it has nothing more to take: at the end of its turn. What came in one turn runs together. So
a single request does not wait, and while many arrive, or runs take long, many share a run. Short runs are
computed on the thread that calls; long ones on worker threads, and what comes while all of those are busy shares the next.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple, Protocol

from recinfer.errors import ConfigError, DeadlineError
from recinfer.serving.engine.queue_budget import QueueBudget
from recinfer.serving.engine.request import Request

__all__ = ["SHORT_S", "BatchConfig", "Entry", "Runner", "Scheduler", "SchedulerState"]

_log = logging.getLogger("recinfer.serving.server")

SHORT_S = 1e-3
"""A run that is expected to take no longer is computed on the thread that takes requests."""
_MOST_NEW = 128
"""A turn is over when so many have come in it, also while more come: it bounds how long the first of them waits. The value is
uncritical: with 32 callers, 32, 128 and 512 answer within 3 % as many, 8 answers 20 % fewer."""


@dataclass(frozen=True)
class BatchConfig:
    """How requests share runs.

    Attributes:
        max_batch: samples in a merged run; a single request may have more, and then runs on its own.
        max_queue: requests that may wait; one more is refused at once.
    """

    max_batch: int = 1024
    max_queue: int = 512

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
                raise ConfigError(f"batching: {item.name}: got {value!r}, expected an integer from 1 to 2^31 - 1")


class Entry:
    """A queued request.

    Args:
        request: what is answered.
        key: entries of one runner and equal keys may share a run.
        samples: size of its batch.
        work: what the runner needs of it.
    """

    __slots__ = ("key", "notified", "request", "samples", "since", "work")

    def __init__(self, request: Request, key: Hashable, samples: int, work: Any = None) -> None:
        self.request, self.key, self.samples, self.work = request, key, samples, work
        self.since = 0.0
        self.notified = False  # whether its request was notified that it waits


class Runner(Protocol):
    """Runs entries of one kind. ``run`` is called on a worker, or for a short run on the thread that called
    :meth:`Scheduler.run_ready`; the others on either, with the scheduler's lock, so they return at once."""

    def can_start(self) -> bool:
        """Whether one more run may begin now."""
        ...

    def may_share(self, entry: Entry, samples: int) -> bool:
        """Whether ``entry`` may be added to a run that has ``samples`` with it."""
        ...

    def seconds(self, entry: Entry, samples: int, threads: int) -> float:
        """How long a run of so many samples like ``entry`` is expected to take on so many threads; infinite: it is for a
        worker, however short."""
        ...

    def run(self, entries: Sequence[Entry], threads: int) -> None:
        """Answer entries of one key, or see to it that they are answered; ``threads``: that have nothing else to do, this one
        among them."""
        ...


@dataclass(frozen=True)
class SchedulerState:
    """What the scheduler does now, and did: for metrics."""

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
    """Any thread may call.

    Args:
        config: the bounds.
        threads: workers for long runs.
        at_a_time: see recinfer.serving.engine.queue_budget.QueueBudget.
        waited: called with the seconds that each request has waited for its run.

    Attributes:
        queue: counts queued requests.
        workers: the threads for long runs.
        has_new: something was submitted since the last :meth:`run_ready` began.
    """

    def __init__(
        self,
        config: BatchConfig,
        threads: int,
        at_a_time: int | None = None,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.config, self._threads, self._waited = config, threads, waited
        self.queue = QueueBudget(config.max_queue, at_a_time or threads)
        self.workers = ThreadPoolExecutor(threads, thread_name_prefix="recinfer-work")
        self._lanes: OrderedDict[tuple[Runner, Hashable], deque[Entry]] = OrderedDict()
        self._lock = threading.Lock()
        self._new = self._new_samples = 0
        self._busy = self._under_way = 0
        self._runs = self._requests = self._samples = self._expired = 0

    def close(self) -> None:
        """No request will come any more."""
        self.workers.shutdown(wait=False, cancel_futures=True)

    @property
    def state(self) -> SchedulerState:
        """Figures of this moment."""
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
    def has_new(self) -> bool:
        """Something was submitted since the last :meth:`run_ready`."""
        return self._new > 0

    @property
    def is_due(self) -> bool:
        """So much was submitted since the last :meth:`run_ready` that a turn should end."""
        return self._new >= _MOST_NEW or self._new_samples >= self.config.max_batch

    def check_deadline(self, deadline: float) -> None:
        """Raises DeadlineError when ``time.monotonic()`` is past ``deadline``."""
        if time.monotonic() >= deadline:
            with self._lock:
                self._expired += 1
            raise DeadlineError("the deadline had passed when the request arrived; it was not run")

    def submit(self, runner: Runner, entry: Entry) -> None:
        """Have ``entry`` wait; the caller calls :meth:`run_ready` when it has nothing more to take."""
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
        """Its caller has disconnected: free its place, unless its run has begun."""
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
        """Run ``work`` on a worker; nothing is run any more once the server has stopped."""
        with suppress(RuntimeError):
            self.workers.submit(work)

    def begin(self) -> None:
        """Something is under way that takes no thread meanwhile; :meth:`done` is called when it is over."""
        with self._lock:
            self._under_way += 1

    def done(self, requests: int, samples: int, seconds: float) -> None:
        """What was begun is over, after ``seconds``; 0 requests: it came to nothing."""
        with self._lock:
            self._under_way -= 1
        if requests:
            self.count(requests, samples)
            self.queue.took(seconds, requests)

    def count(self, requests: int, samples: int) -> None:
        """Requests were run together."""
        with self._lock:
            self._runs += 1
            self._requests += requests
            self._samples += samples

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
                self._lanes.move_to_end(key)  # the other lanes first
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
        """How many of the oldest entries share the next run, and their samples."""
        count, samples = 1, lane[0].samples
        for entry in islice(lane, 1, None):
            total = samples + entry.samples
            if total > self.config.max_batch or not runner.may_share(entry, total):
                break
            count, samples = count + 1, total
        return count, samples

    # -- runs

    def _work(self, run: _Run) -> None:
        """On a worker."""
        try:
            self._run(run)
        finally:
            with self._lock:
                self._busy -= 1
        self.run_ready()

    def _run(self, run: _Run) -> None:
        now = time.monotonic()
        for entry in run.entries:
            self._waited(now - entry.since)
        if not run.entries:
            return
        try:
            run.runner.run(run.entries, run.threads)
        except Exception as error:  # a bug of ours: those that were not answered get the error
            _log.exception("a run of %d requests failed", len(run.entries))
            for entry in run.entries:
                entry.request.reply(error)

    def _notify_waiting(self) -> None:
        """Requests that have to wait for a thread are notified, once."""
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
