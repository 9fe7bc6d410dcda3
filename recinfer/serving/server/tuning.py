"""Settings of Python and of the system's scheduler for a process that serves."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

__all__ = ["SWITCH_INTERVAL_S", "tune_process"]

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
