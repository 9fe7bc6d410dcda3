"""Histograms of the time that each stage of a request takes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BATCH_BOUNDS", "SECONDS_BOUNDS", "Histogram", "HistogramState", "Stages", "sum_histograms"]

# 20 us to 10 s, three to a decade: a lookup of one sample takes some 30 us.
SECONDS_BOUNDS = (
    2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0
)  # fmt: skip
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class HistogramState:
    """``counts[i]`` values are in (bounds[i - 1], bounds[i]]; the last count is of values above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


class Histogram:
    """Counts values between fixed bounds. Thread-safe.

    >>> times = Histogram((1.0, 2.0))
    >>> times.add(1.5)
    >>> times.state().counts
    (0, 1, 0)
    """

    def __init__(self, bounds: Sequence[float] = SECONDS_BOUNDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        """Count ``value``."""
        at = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[at] += 1
            self._total += value

    def state(self) -> HistogramState:
        """The current counts."""
        with self._lock:
            return HistogramState(self._bounds, tuple(self._counts), self._total)


def sum_histograms(states: Sequence[HistogramState]) -> HistogramState:
    """The sum of one or more histograms with equal bounds."""
    counts = tuple(sum(column) for column in zip(*(state.counts for state in states), strict=True))
    return HistogramState(states[0].bounds, counts, sum(state.total for state in states))


class Stages:
    """One histogram of seconds for each stage name."""

    def __init__(self, *names: str) -> None:
        self._histograms = {name: Histogram() for name in names}

    def add(self, stage: str, seconds: float) -> None:
        """Count ``seconds`` of ``stage``."""
        self._histograms[stage].add(seconds)

    def state(self) -> dict[str, HistogramState]:
        """The current counts, by stage."""
        return {name: histogram.state() for name, histogram in self._histograms.items()}
