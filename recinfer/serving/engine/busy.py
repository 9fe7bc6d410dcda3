"""Measures how busy a server's threads are, and its load. No queue shows these: waiting calls stay in the sockets' buffers."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from recinfer.serving.engine.scheduler import Scheduler

__all__ = ["WINDOW_S", "BusyShare", "Load", "thread_seconds"]

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


class Load:
    """The load of a server of models over the last ten seconds, from 0 to 1: the largest of

    - the busy time of each thread that answers requests,
    - the mean number of requests in flight, queued or run, over the number of runs at a time,
    - on a ranker, the mean number of fan-outs in flight, over the most that it begins.

    The length of the queue is no such figure: it is 0 until the server is full. The mean number in flight grows faster than
    the busy time, as it includes the requests that wait for others.

    Args:
        scheduler: counts the seconds of requests and fan-outs.
        most_runs: runs at a time.
        most_fan_outs: fan-outs at a time.
        thread_ids: native ids of the threads that answer requests; None entries are left out.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        most_runs: int,
        most_fan_outs: int,
        thread_ids: Iterable[int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._since = clock, clock()
        self._shares = [
            BusyShare(lambda: scheduler.occupied_s[0] / most_runs, clock),
            BusyShare(lambda: scheduler.occupied_s[1] / most_fan_outs, clock),
            *(BusyShare(functools.partial(thread_seconds, each), clock) for each in thread_ids if each is not None),
        ]

    def now(self) -> float:
        """The load; any thread may call. The time before the construction counts as idle."""
        passed = self._clock() - self._since
        return max(share.now() for share in self._shares) * min(1.0, passed / WINDOW_S)
