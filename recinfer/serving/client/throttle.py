"""Holds back calls that a full server would refuse."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

__all__ = ["Throttle"]

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
