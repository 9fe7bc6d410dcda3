"""Waiting in tests: for a condition, with a timeout that only a fault reaches, and for a process to stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["stand_still", "until"]


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for ``condition``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def stand_still(pid: int) -> None:
    """Send SIGSTOP and wait until all threads of the process have stopped.

    The signal stops a process once one of its threads gets to run and takes it; on a busy machine the others may still answer a
    request until then.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _states(pid) <= {"T", "Z"})


def _states(pid: int) -> set[str]:
    """States of its threads, as in proc(5); those that have ended meanwhile are left out."""
    found = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found
