"""Tests beside other threads: waiting for a condition, a process that stands still, a file that is read while it is written."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["replace_bytes", "replace_text", "stand_still", "until"]


def until(condition: Callable[[], object], seconds: float = 200.0) -> None:
    """Wait for ``condition``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def replace_text(path: Path, text: str) -> None:
    """Give the file at ``path`` a new text in one step: a program that reads it meanwhile sees the old or the new text, no part."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """:func:`replace_text` for bytes."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


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
