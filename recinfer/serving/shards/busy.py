"""Measures how busy a server's threads are. No queue shows it: waiting calls stay in the sockets' buffers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["BusyShare", "thread_seconds"]

_WINDOW_S = 10.0
_LOOKS = 32  # that are remembered of a window
_NS = 1e9


def thread_seconds(native_id: int) -> float:
    """Seconds since it started in which a thread of this process had something to do: on a core, or waiting for one.

    Time on a core alone would be low on an overloaded machine, as if its servers were idle. 0 where the
    kernel does not say (another system, a sandbox), or the thread has ended.

    Args:
        native_id: as ``threading.get_native_id()`` gives it.
    """
    try:
        on_core, waited, _ = map(int, Path(f"/proc/self/task/{native_id}/schedstat").read_text().split())
    except (OSError, ValueError):
        return 0.0
    return (on_core + waited) / _NS


class BusyShare:
    """The share of the last ten seconds that was busy: what ``seconds`` has grown by, by the time that has passed.

    Nothing runs between two looks: who looks less often than every ten seconds has the share since the last look.
    Any thread may look.

    Args:
        seconds: how long whatever is followed has been busy since some moment; it never shrinks.
        clock: seconds, of which the difference counts.
    """

    def __init__(self, seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._lock = seconds, clock, threading.Lock()
        self._looks = deque([(clock(), seconds())])

    def now(self) -> float:
        """0 to 1; 0 at once after it was made."""
        with self._lock:
            now, busy = self._clock(), self._seconds()
            while len(self._looks) > 1 and self._looks[1][0] <= now - _WINDOW_S:
                self._looks.popleft()
            since, before = self._looks[0]
            if now - self._looks[-1][0] >= _WINDOW_S / _LOOKS:
                self._looks.append((now, busy))
            return min(1.0, max(0.0, (busy - before) / (now - since))) if now > since else 0.0
