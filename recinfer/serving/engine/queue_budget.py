"""The room for requests that wait: how much there is, how long the wait is, and what one is told for which there is none."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from recinfer.errors import OverloadedError
from recinfer.serving.engine.run_times import SMOOTHING

__all__ = ["MARGIN", "Room"]

MARGIN = 1.5
"""What the wait may turn out longer by than is expected."""

_FULL, _TOO_LATE = "its limit", "more than its deadline allows"
_SAME_WORDS_S = 20e-3


class _Said(NamedTuple):
    """What one that was refused was told, whether for a full queue, and when (``time.monotonic()``)."""

    full: bool | None
    at: float
    error: OverloadedError


_NOTHING_YET = _Said(None, -math.inf, OverloadedError(""))


class Room:
    """Counts those that wait.

    All of it belongs to the event loop but :meth:`refused`, which is for the thread that takes gRPC's events, and :meth:`took`.

    Args:
        most: requests that may wait; ``most_bytes``: of these.
        threads: runs at a time.

    Attributes:
        queued: requests that wait for a run.
    """

    def __init__(self, most: int, most_bytes: int, threads: int) -> None:
        self._most, self._most_bytes, self._threads = most, most_bytes, threads
        self.queued = 0
        self._placed = self._bytes = 0
        self._said = _NOTHING_YET
        self._lock = threading.Lock()
        self._seconds_a_request = 1e-3
        self._refused = self._refused_at_once = 0

    @property
    def waiting(self) -> int:
        """Requests that wait, those included whose message is still decoded."""
        return self.queued + self._placed

    @property
    def refusals(self) -> int:
        """How many there have been."""
        return self._refused + self._refused_at_once

    def enter(self, num_bytes: int) -> None:
        """One waits for a run."""
        self.queued += 1
        self._bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """It does not any more."""
        self.queued -= 1
        self._bytes -= num_bytes

    @contextmanager
    def place(self, num_bytes: int) -> Iterator[None]:
        """A place while a long message is decoded; raises OverloadedError when there is none."""
        self.admit(num_bytes)
        self._placed += 1
        self._bytes += num_bytes
        try:
            yield
        finally:
            self._placed -= 1
            self._bytes -= num_bytes

    def admit(self, num_bytes: int) -> None:
        """Raises OverloadedError when there is no room; cheap, so called before a message is decoded."""
        waiting = self.waiting
        if waiting < self._most and self._bytes + num_bytes <= self._most_bytes:
            return
        if not waiting:  # a single message longer than the queue: its own limit is the message's
            return
        raise self._refusal(_FULL)

    def check_wait(self, now: float, deadline: float) -> None:
        """Raises OverloadedError where one that waits now would be answered when nobody waits for it any more: it would be run
        in the place of one that somebody waits for."""
        if self.queued and self._is_late(now, deadline):
            raise self._refusal(_TOO_LATE)

    def refused(self, deadline: float) -> OverloadedError | None:
        """What a short request is told for which there is no room now; it counts as refused. None: there is room.

        On one thread alone, the one that takes gRPC's events. Those of the same few milliseconds are told the same: to find
        words for each would be a fifth of what a refusal costs.
        """
        waiting = self.waiting
        if not waiting:
            return None
        now, full = time.monotonic(), waiting >= self._most
        if not full and not self._is_late(now, deadline):
            return None
        said = self._said
        if said.full is not full or now - said.at > _SAME_WORDS_S:
            said = self._said = _Said(full, now, self._words(_FULL if full else _TOO_LATE))
        self._refused_at_once += 1
        return said.error

    def took(self, seconds: float, requests: int) -> None:
        """A run of so many requests took so long; on any thread."""
        with self._lock:
            self._seconds_a_request += SMOOTHING * (seconds / requests - self._seconds_a_request)

    def _is_late(self, now: float, deadline: float) -> bool:
        return now + MARGIN * self._expected_wait() > deadline

    def _expected_wait(self) -> float:
        return self.waiting * self._seconds_a_request / self._threads

    def _refusal(self, why: str) -> OverloadedError:
        with self._lock:
            self._refused += 1
        return self._words(why)

    def _words(self, why: str) -> OverloadedError:
        seconds = max(0.001, self._expected_wait())
        return OverloadedError(
            f"the server has {self.waiting} requests waiting, {why}; try again in {seconds * 1e3:.0f} ms",
            retry_after=seconds,
        )
