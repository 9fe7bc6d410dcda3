"""Settings of Python and of the system's scheduler for a process that serves."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import sys
import time
from contextlib import suppress

__all__ = ["SWITCH_INTERVAL_S", "most_connections", "raise_open_files", "tell_open_files", "tune_process"]

_MOST_FILES = 1 << 20  # some systems' hard limit is a thousand times this, and some programs have a table of that size
_SPARE = 64  # open files that are kept from connections: this many or an eighth of the limit, at most half of it
_LOOK_S, _TOLD_S = 1.0, 60.0
_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""Seconds for which a Python thread may keep another thread waiting in a serving process: a thread with a large request delays
the event loop that long at each step, and Python's default of 5 ms would be most of a small request's latency."""


def tune_process() -> None:
    """Set this process up for serving; call it in the main thread, after models are loaded and before the server starts.

    - Threads made from here on are batch threads to the scheduler (Linux): gRPC's own threads, woken five times a
      request, do not push the event loop's thread off its core each time.
    - Objects that are loaded by now are left out of garbage collection, whose full runs would else stop all requests. Full
      runs come as often as by Python's default, which the command line lowers while it loads.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # in a sandbox that forbids it only speed is lost
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 10)


def raise_open_files() -> None:
    """Let this process and its children open as many files as the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # in a sandbox that forbids it the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """The number of connections that gRPC may have: below the limit of open files, so that probes and scrapes are answered."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    return max(1, min(soft, _MOST_FILES) - min(max(_SPARE, soft // 8), soft // 2))


async def tell_open_files() -> None:
    """Log, at most once a minute, that connections are refused for too many open files; runs until it is cancelled."""
    told = -_TOLD_S
    while True:
        await asyncio.sleep(_LOOK_S)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest = os.open(os.devnull, os.O_RDONLY)  # the lowest free number
            os.close(lowest)
        except OSError:
            lowest = soft  # none is free
        if lowest >= most_connections() and time.monotonic() - told >= _TOLD_S:
            told = time.monotonic()
            _log.error(
                "%d files and connections are open, and this process may open %d: further gRPC connections are refused; raise "
                "the limit of open files (ulimit -n, LimitNOFILE), or have fewer connections",
                *(lowest, soft),
            )
