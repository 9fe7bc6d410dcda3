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

_MOST_FILES = 1 << 20  # some systems' hard limit is a thousand times that, and some programs have a table of that size
_SPARE = 64  # of the files that may be open, at least that many, or an eighth
_LOOK_S, _TOLD_S = 1.0, 60.0
_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""How long a Python thread may keep another one waiting, in a process that serves: one that runs a large request keeps
the event loop waiting that long at each step; at Python's 5 ms that is most of a small request."""


def tune_process() -> None:
    """Set this process up for serving; call it in the main thread, after models are loaded and before the server starts.

    - Threads made from here on are batch threads to the scheduler (Linux): gRPC's own threads, woken five times a
      request, do not push the event loop's thread off its core each time.
    - What is loaded by now is left out of garbage collection, whose full runs would else stop all requests; they come as
      often as Python has them, where the command line had fewer of them while it loaded.
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
    """How many connections gRPC may have: fewer than files may be open, so that probes and scrapes of the other ports are answered."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    return max(1, min(soft, _MOST_FILES) - max(_SPARE, soft // 8))


async def tell_open_files() -> None:
    """Log, at most once a minute, that so many files are open that connections are refused; runs until it is cancelled."""
    told = -_TOLD_S
    while True:
        await asyncio.sleep(_LOOK_S)
        most = most_connections()
        try:
            lowest = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
            os.close(lowest)
        except OSError:
            lowest = most
        if lowest >= most and time.monotonic() - told >= _TOLD_S:
            told = time.monotonic()
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.error(
                "%d files and connections are open, and this process may open %d: further gRPC connections are refused; raise "
                "the limit of open files (ulimit -n, LimitNOFILE), or have fewer connections",
                *(lowest, soft),
            )
