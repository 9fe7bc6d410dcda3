"""The share of a server's capacity in use: the figure by which an autoscaler adds servers before their latency grows."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable

from recinfer.serving.engine.scheduler import Scheduler
from recinfer.serving.shards.busy import WINDOW_S, BusyShare, thread_seconds

__all__ = ["Load"]


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
