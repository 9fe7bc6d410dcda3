"""The queue budget: how many requests may wait, the expected wait, and the error of a refused request."""

from __future__ import annotations

import math
import threading
import time
from typing import NamedTuple

from recinfer.errors import OverloadedError

__all__ = ["QueueBudget"]

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
