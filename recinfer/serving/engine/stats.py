"""Counts the answers of a server by version, call and code, and the seconds of their stages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from recinfer.inference.stages import BATCH_BOUNDS, Histogram, HistogramState, Stages, sum_histograms

__all__ = ["AnswerCounts", "RequestStats"]


class AnswerCounts:
    """Answers by call and gRPC code name, and their seconds by call: of one served version, or of no version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: Counter[tuple[str, str]] = Counter()
        self._latency: dict[str, Histogram] = {}

    def add(self, call: str, code: str, seconds: float | None) -> None:
        """Count one answer; None: an answer without a duration."""
        with self._lock:
            self._codes[call, code] += 1
            if seconds is None:
                return
            latency = self._latency.get(call)
            if latency is None:
                latency = self._latency[call] = Histogram()
        latency.add(seconds)

    def take(self) -> AnswerCounts:
        """Move the counts to a new object, so that answers that are counted later are not counted twice."""
        taken = AnswerCounts()
        with self._lock:
            taken._codes, self._codes = self._codes, taken._codes
            taken._latency, self._latency = self._latency, taken._latency
        return taken

    def codes(self) -> dict[tuple[str, str], int]:
        """Answers by (call, code)."""
        with self._lock:
            return dict(self._codes)

    def latency(self) -> dict[str, HistogramState]:
        """Histograms of seconds by call."""
        with self._lock:
            latency = dict(self._latency)
        return {call: histogram.state() for call, histogram in latency.items()}


class RequestStats:
    """Requests answered since the start. Thread-safe.

    Args:
        served: returns the counts of the versions that are served now.

    Attributes:
        stages: seconds of decode, queue and encode; each predictor counts its own lookup and dense.
        batch: samples of a request.
        unnamed: answers to requests that name nothing served.
    """

    def __init__(self, served: Callable[[], Collection[AnswerCounts]] = tuple) -> None:
        self.stages = Stages("decode", "queue", "encode")
        self.batch = Histogram(BATCH_BOUNDS)
        self.unnamed = AnswerCounts()
        self._served = served
        self._lock = threading.Lock()
        self._counted = {self.unnamed}  # all counts that may have an answer and are not part of the next two
        self._past_codes: Counter[tuple[str, str]] = Counter()
        self._past_latency: dict[str, HistogramState] = {}

    def add(self, call: str, code: str, seconds: float | None, version: AnswerCounts | None = None) -> None:
        """Count one answer to ``call`` with ``code`` after ``seconds`` in the server.

        Args:
            seconds: None: the call was refused when it arrived.
            version: the counts of the version that the request got; None: the request names nothing served.
        """
        counts = self.unnamed if version is None else version
        counts.add(call, code, seconds)
        if counts not in self._counted:
            with self._lock:
                self._counted.add(counts)

    def requests(self) -> dict[tuple[str, str], int]:
        """Answers by (call, code), of unloaded versions too."""
        with self._lock:
            self._fold()
            return dict(sum((Counter(counts.codes()) for counts in self._counted), self._past_codes))

    def latency(self) -> dict[str, HistogramState]:
        """Histograms of the seconds from the request's arrival in Python to its answer, by call, of unloaded versions too."""
        with self._lock:
            self._fold()
            return _sum([self._past_latency, *(counts.latency() for counts in self._counted)])

    def _fold(self) -> None:
        """Add the counts of unloaded versions to the past."""
        for gone in self._counted - {self.unnamed, *self._served()}:
            self._counted.discard(gone)
            taken = gone.take()
            self._past_codes.update(taken.codes())
            self._past_latency = _sum([self._past_latency, taken.latency()])


def _sum(found: Collection[Mapping[str, HistogramState]]) -> dict[str, HistogramState]:
    names = dict.fromkeys(name for states in found for name in states)
    return {name: sum_histograms([states[name] for states in found if name in states]) for name in names}
