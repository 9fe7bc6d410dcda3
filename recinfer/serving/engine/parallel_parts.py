"""Runs the parts of one request in parallel, on its own thread and on a pool."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["ParallelParts"]

T = TypeVar("T")


class ParallelParts:
    """Runs the parts of a request in parallel, on the caller's thread and on a pool. Several threads may call at a time.

    The caller runs each part that no other thread has begun when the caller reaches it: on a machine that is busy otherwise
    the parts take no longer than in sequence.

    Args:
        threads: number of threads for a caller's works, its own thread included. The first call starts the pool.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._offered: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = self._closed = False

    def run(self, works: Sequence[Callable[[], T]]) -> tuple[list[T], float]:
        """Run ``works``; returns their results and the CPU seconds that other threads spent on them.

        Raises:
            Exception: the error of the first of the failed works; raised when all works have ended.
        """
        if len(works) > 1 and not self._started:
            self._start()
        jobs = [_Work(work) for work in works]
        for job in jobs[1:]:
            self._offered.put(job)
        for job in jobs:
            job.run_if_free()
        elsewhere = 0.0
        for job in jobs:
            elsewhere += job.wait()
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [job.result for job in jobs], elsewhere

    def close(self) -> None:
        """End the threads; later works run on their callers' threads."""
        with self._lock:
            if self._started and not self._closed:
                for _ in range(self.threads - 1):
                    self._offered.put(None)
            self._closed = True

    def _start(self) -> None:
        with self._lock:
            if self._started or self._closed:
                return
            self._started = True
            for _ in range(self.threads - 1):
                threading.Thread(target=self._take, name="recinfer-part", daemon=True).start()

    def _take(self) -> None:
        while (job := self._offered.get()) is not None:
            job.run_if_free(elsewhere=True)
            del job  # the job holds a request


class _Work:
    """A caller's piece of work, with its result or error."""

    __slots__ = ("_free", "_over", "_seconds", "_work", "error", "result")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._free = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()
        self._seconds = 0.0
        self.result: Any = None
        self.error: Exception | None = None

    def run_if_free(self, *, elsewhere: bool = False) -> None:
        """Run the work unless a thread has begun it."""
        if not self._free.acquire(blocking=False):
            return
        begun = time.thread_time() if elsewhere else 0.0
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        finally:
            if elsewhere:
                self._seconds = time.thread_time() - begun
            self._over.release()

    def wait(self) -> float:
        """Wait until the work has ended; returns the CPU seconds that another thread spent on it."""
        self._over.acquire()
        return self._seconds
