"""Measures how busy a server's threads are. No queue shows the load: waiting calls stay in the sockets' buffers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["WINDOW_S", "BusyShare", "thread_seconds"]

WINDOW_S = 10.0
"""Seconds over which the share is a mean."""
_LOOKS = 32  # looks of a window that are kept
_NS = 1e9


def thread_seconds(native_id: int) -> float:
    """Seconds since its start in which a thread of this process was runnable: on a core, or waiting for a core.

    Time on a core alone would be low on an overloaded machine, as if its servers were idle. 0 where the
    kernel reports no times (another system, a sandbox), or the thread has ended.

    Args:
        native_id: the thread's id from ``threading.get_native_id()``.
    """
    try:
        on_core, waited, _ = map(int, Path(f"/proc/self/task/{native_id}/schedstat").read_text().split())
    except (OSError, ValueError):
        return 0.0
    return (on_core + waited) / _NS


class BusyShare:
    """The busy share of the last ten seconds: the growth of ``seconds``, divided by the time that has passed.

    No work runs between two looks: a caller that looks less often than every ten seconds gets the share since its last look.
    Any thread may look.

    Args:
        seconds: returns the busy seconds since some moment, which never decrease.
        clock: returns the time in seconds.
    """

    def __init__(self, seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._looks = deque([(clock(), seconds())])

    def now(self) -> float:
        """The busy share, 0 to 1; 0 right after the construction."""
        with self._lock:
            now, busy = self._clock(), self._seconds()
            while len(self._looks) > 1 and self._looks[1][0] <= now - WINDOW_S:
                self._looks.popleft()
            since, before = self._looks[0]
            if now - self._looks[-1][0] >= WINDOW_S / _LOOKS:
                self._looks.append((now, busy))
            return min(1.0, max(0.0, (busy - before) / (now - since))) if now > since else 0.0
