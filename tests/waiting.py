"""Polling for a condition in tests, with a timeout that only a fault reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for ``condition``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
