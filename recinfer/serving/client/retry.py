"""When a client retries a call, and holds back calls that a full server would refuse."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from recinfer.errors import InputError, OverloadedError

__all__ = ["LONGEST_S", "Retries", "Throttle", "check_timeout", "is_full", "pushback"]

_FIRST_WAIT_S, _MAX_WAIT_S = 0.02, 1.0
# No client cancels a call and then reads its answer, so CANCELLED comes from a stopping server that drops new calls.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_PUSHBACK = "grpc-retry-pushback-ms"
LONGEST_S = 1e8
"""The longest timeout that gRPC accepts, in seconds: its clock overflows for a longer timeout, which then counts as passed."""


def check_timeout(seconds: float) -> None:
    """Raise InputError unless ``seconds`` is a number above 0."""
    if not isinstance(seconds, int | float | np.number) or not seconds > 0:  # nan too
        raise InputError(f"timeout: got {seconds!r}, expected seconds, more than 0")


class Retries:
    """The tries of one call that changes nothing, so that a retry is safe. A wrong request is not retried.

    Args:
        target: the server's address, for messages.
        retries: number of tries that may follow the first.
        seconds: seconds until the call fails.
        throttle: the server's recent refusals of such calls; None: all calls are sent.

    Raises:
        InputError: ``seconds`` is no number above 0.
    """

    def __init__(self, target: str, retries: int, seconds: float, throttle: Throttle | None) -> None:
        check_timeout(seconds)
        self._target = target
        self._retries = retries
        self._throttle = throttle
        self._end = time.monotonic() + min(seconds, LONGEST_S)
        self._tried = 0

    @property
    def left(self) -> float:
        """Seconds until the call fails, at least 0.001."""
        return max(0.001, self._end - time.monotonic())

    def held_back(self) -> float | None:
        """Seconds to wait if this try is held back; None: send it.

        Raises:
            OverloadedError: no further try is allowed, or no time is left for it.
        """
        if self._throttle is None or not self._throttle.holds_back():
            return None
        wait = self._next_wait(_FIRST_WAIT_S * 4**self._tried)
        if wait is None:
            raise OverloadedError(
                f"{self._target} refuses calls, as it is full, so this one was not sent; send less or try again later",
                retry_after=_FIRST_WAIT_S,
            )
        return wait

    def failed(self, error: Any) -> float | None:
        """Record a failed try; returns the seconds before the next, or None if a retry is useless or not allowed."""
        if self._throttle is not None and is_full(error):
            self._throttle.record(refused=True)
        if not is_full(error) and error.code() not in _GONE:
            return None
        asked = pushback(error)
        return self._next_wait(_FIRST_WAIT_S * 4**self._tried if asked is None else asked)

    def answered(self) -> None:
        """Record that the server accepted the call."""
        if self._throttle is not None:
            self._throttle.record(refused=False)

    def _next_wait(self, wait: float) -> float | None:
        wait = min(wait, _MAX_WAIT_S) * random.uniform(1.0, 1.5)  # so that clients do not retry all at once
        if self._tried >= self._retries or time.monotonic() + wait >= self._end:
            return None
        self._tried += 1
        return wait


def pushback(error: Any) -> float | None:
    """Seconds after which the server invites a retry; None if its error names no time."""
    asked = next((value for key, value in error.trailing_metadata() or () if key == _PUSHBACK), None)
    return float(asked) / 1000 if asked is not None and str(asked).isdigit() else None


def is_full(error: Any) -> bool:
    """Whether the server refused a call because it is full. A too large message has the same code, without a time to retry."""
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and pushback(error) is not None


_MEMORY_S = 1.0  # seconds in which the weight of a recorded call falls to 1/e
_LEAST, _MOST = 1.05, 2.0  # sent calls per accepted call: with over a twentieth refused, and with none refused
_REFUSED = 0.05
_SPARE = 10.0  # calls that always pass
_FORGOTTEN = 1e-3  # a smaller weight of refusals counts as none


class Throttle:
    """Decides which calls a client holds back, from the server's recent answers and refusals. Thread-safe.

    A refusal costs a server almost as much as a small answer, so a server that gets three times its capacity spends
    its time on refusals. With a throttle a client sends a twentieth more than the server accepts, whatever its own load is;
    each client decides by its own answers, so any number of them can share a server. The twentieth detects
    when the server has capacity again; the surplus grows while no call is refused, so that the rate doubles within a second.

    The formula is client-side throttling of Beyer et al., Site Reliability Engineering (2016), chapter 21: a call is held back
    with probability ``(asked - k * taken - 10) / (asked + 1)``, counted over about the last second. The book's k is 2, or 1.1
    where refusals are expensive. With a constant 1.1, a server that was down for a moment would take a minute to get its load
    back, so here k falls from 2 to 1.05 as the share of refused calls rises to a twentieth, and rises again as refusals cease.
    Ten calls per second always pass, so that a client with few calls is never held back after a single refusal.

    Args:
        clock: returns the time in seconds.
        chance: returns a random number from 0 to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._asked = self._taken = self._refused = 0.0  # in about the last second: older calls weigh less
        self._at = clock()

    def holds_back(self) -> bool:
        """Whether to hold this call back; a held-back call is counted here, a sent call by :meth:`record`.

        Failures other than refusals say nothing about the server's capacity.
        """
        if not self._refused:  # the usual case, without the lock
            return False
        with self._lock:
            self._age()
            sure = 1 - min(1.0, self._refused / (_REFUSED * (self._taken + self._refused + 1)))
            most = (_LEAST + (_MOST - _LEAST) * sure) * self._taken + _SPARE
            held = self._chance() * (self._asked + 1) < self._asked - most
            self._asked += held
            return held

    def record(self, *, refused: bool) -> None:
        """Record the result of a call: the server answered it, or ``refused`` it because it is full."""
        with self._lock:
            self._age()
            self._asked += 1
            self._taken += not refused
            self._refused += refused

    def _age(self) -> None:
        now = self._clock()
        kept = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        self._asked *= kept
        self._taken *= kept
        self._refused = self._refused * kept if self._refused > _FORGOTTEN else 0.0
