"""Estimates the cost of a model's dense runs, by which the scheduler recognizes short runs and sizes merged ones."""

from __future__ import annotations

__all__ = ["RunCost"]

_DECAY = 0.8


class RunCost:
    """Smoothed CPU seconds per sample of one version of a model, weighted by samples.

    A sample costs less in a large run than alone: a rate that was learned from single samples is too high for the first
    merged run, and right after it. Any thread may call; of two simultaneous calls, one figure may be lost.
    """

    __slots__ = ("_samples", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._samples = 0.0

    def expected(self, samples: int) -> float:
        """Expected CPU seconds of a run of ``samples`` samples; 0 before the first run."""
        return self._seconds / self._samples * samples if self._samples else 0.0

    def learn(self, samples: int, seconds: float) -> None:
        """Record a run of ``samples`` samples that took ``seconds`` CPU seconds."""
        self._seconds = _DECAY * self._seconds + seconds
        self._samples = _DECAY * self._samples + samples
