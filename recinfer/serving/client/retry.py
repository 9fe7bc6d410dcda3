"""When a client retries a call, and when it holds a call back."""

from __future__ import annotations

import random
import time
from typing import Any

import grpc
import numpy as np

from recinfer.errors import InputError, OverloadedError
from recinfer.serving.client.throttle import Throttle

__all__ = ["LONGEST_S", "Retries", "is_full", "pushback"]

_FIRST_WAIT_S, _MAX_WAIT_S = 0.02, 1.0
# No client cancels a call and then reads its answer, so CANCELLED comes from a stopping server that drops new calls.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_PUSHBACK = "grpc-retry-pushback-ms"
LONGEST_S = 1e8
"""The longest timeout that gRPC accepts: its clock overflows for a longer one, which then counts as passed."""


class Retries:
    """The tries of one call that changes nothing, so that a retry is safe. A refused request that is wrong is not retried.

    Args:
        target: where it goes, for messages.
        retries: how many tries may follow the first.
        seconds: until it fails.
        throttle: the server's recent refusals of such calls; None: all calls are sent.

    Raises:
        InputError: no time at all.
    """

    def __init__(self, target: str, retries: int, seconds: float, throttle: Throttle | None) -> None:
        if not isinstance(seconds, int | float | np.number) or not seconds > 0:  # nan too
            raise InputError(f"timeout: got {seconds!r}, expected seconds, more than 0")
        self._target, self._retries, self._throttle = target, retries, throttle
        self._end, self._tried = time.monotonic() + min(seconds, LONGEST_S), 0

    @property
    def left(self) -> float:
        """Seconds until it fails."""
        return max(0.001, self._end - time.monotonic())

    def held_back(self) -> float | None:
        """Seconds to wait if this try is held back; None: send it.

        Raises:
            OverloadedError: it has waited often enough.
        """
        if self._throttle is None or not self._throttle.holds_back():
            return None
        wait = self._again(_FIRST_WAIT_S * 4**self._tried)
        if wait is None:
            raise OverloadedError(
                f"{self._target} refuses calls, as it is full, so this one was not sent; send less or try again later",
                retry_after=_FIRST_WAIT_S,
            )
        return wait

    def failed(self, error: Any) -> float | None:
        """Seconds to wait before the next try; None if another try is useless, too late, or one too many."""
        if self._throttle is not None and is_full(error):
            self._throttle.heard(refused=True)
        if not is_full(error) and error.code() not in _GONE:
            return None
        asked = pushback(error)
        return self._again(_FIRST_WAIT_S * 4**self._tried if asked is None else asked)

    def answered(self) -> None:
        """The server accepted the call."""
        if self._throttle is not None:
            self._throttle.heard(refused=False)

    def _again(self, wait: float) -> float | None:
        wait = min(wait, _MAX_WAIT_S) * random.uniform(1.0, 1.5)  # not all clients at once
        if self._tried >= self._retries or time.monotonic() + wait >= self._end:
            return None
        self._tried += 1
        return wait


def pushback(error: Any) -> float | None:
    """Seconds after which the server asks to be tried again; None: it does not say."""
    asked = next((value for key, value in error.trailing_metadata() or () if key == _PUSHBACK), None)
    return float(asked) / 1000 if asked is not None and str(asked).isdigit() else None


def is_full(error: Any) -> bool:
    """Whether the server refused it because it is full; a message that is too large has the same code, but no retry helps."""
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and pushback(error) is not None
