"""Counts the answers of a server by call and code, and the seconds of their stages."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

from recinfer.inference.stages import BATCH_BOUNDS, Histogram, HistogramState, Stages

__all__ = ["RequestStats"]


class RequestStats:
    """Requests answered since the start, by (call, gRPC code name). Thread-safe.

    Attributes:
        stages: seconds of decode, queue and encode; each predictor counts its own lookup and dense.
        batch: samples of a request.
    """

    def __init__(self) -> None:
        self.stages = Stages("decode", "queue", "encode")
        self.batch = Histogram(BATCH_BOUNDS)
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._latency: dict[str, Histogram] = {}

    def add(self, call: str, code: str, seconds: float) -> None:
        """Count one answer to ``call`` with ``code`` after ``seconds`` in the server."""
        with self._lock:
            self._requests[call, code] += 1
            self._seconds[call] += seconds
            latency = self._latency.get(call)
            if latency is None:
                latency = self._latency[call] = Histogram()
        latency.add(seconds)

    def count(self, call: str, code: str) -> None:
        """Count one answer without its duration: a refusal when the call arrived."""
        with self._lock:
            self._requests[call, code] += 1

    def requests(self) -> dict[tuple[str, str], int]:
        """Answers by (call, code)."""
        with self._lock:
            return dict(self._requests)

    def seconds(self) -> dict[str, float]:
        """Seconds from the request's arrival in Python to its answer, summed by call."""
        with self._lock:
            return dict(self._seconds)

    def latency(self) -> dict[str, HistogramState]:
        """Histograms of the seconds from the request's arrival in Python to its answer, by call."""
        with self._lock:
            latency = dict(self._latency)
        return {call: histogram.state() for call, histogram in latency.items()}
