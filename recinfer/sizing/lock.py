"""The interpreter's lock in simulated time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from recinfer.serving.tuning import SWITCH_INTERVAL_S

if TYPE_CHECKING:
    from recinfer.sizing.clock import Thread

__all__ = ["SWITCH_S", "Lock"]

SWITCH_S = SWITCH_INTERVAL_S


class Lock:
    """An interpreter's lock: of the threads that share it one runs at a time, and the others sleep until it is theirs.

    Who has it gives it up when it has nothing to do, or when it has had it for a switch interval and others wait.
    """

    __slots__ = ("_holder", "_line", "_since")

    def __init__(self) -> None:
        self._holder: Thread | None = None
        self._line: deque[Thread] = deque()
        self._since = 0.0

    def take(self, thread: Thread, now: float) -> bool:
        """Whether it has the lock now; else it will be what :meth:`leave` returns, later."""
        if self._holder is None:
            self._holder, self._since = thread, now
        elif self._holder is not thread:
            self._line.append(thread)
        return self._holder is thread

    def leave(self, thread: Thread, more: bool, now: float) -> Thread | None:
        """Who has it next; None: it is nobody's, or still that of ``thread``, which has more to do."""
        if more and (not self._line or now - self._since < SWITCH_S - 1e-12):
            return None
        if more:
            self._line.append(thread)
        self._holder, self._since = (self._line.popleft() if self._line else None), now
        return self._holder
