"""When a client retries a call, and when it holds a call back."""

from __future__ import annotations

import random
import time
from typing import Any

import grpc
import numpy as np

from recinfer.errors import InputError, OverloadedError
from recinfer.serving.client.throttle import Throttle

__all__ = ["LONGEST_S", "Retries", "check_timeout", "is_full", "pushback"]

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
