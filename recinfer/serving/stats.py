"""Counts what a server answered, by call and code."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

__all__ = ["RequestStats"]


class RequestStats:
    """Requests answered since the start, by (call, gRPC code name). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, call: str, code: str, seconds: float) -> None:
        """Count one answer to ``call`` with ``code`` after ``seconds`` in the server."""
        with self._lock:
            self._requests[call, code] += 1
            self._seconds[call] += seconds

    def requests(self) -> dict[tuple[str, str], int]:
        """Answers by (call, code)."""
        with self._lock:
            return dict(self._requests)

    def seconds(self) -> dict[str, float]:
        """Time from the request's arrival in Python to its answer, summed by call."""
        with self._lock:
            return dict(self._seconds)
