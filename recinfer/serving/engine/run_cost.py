"""Estimates the cost of a model's dense runs, by which the scheduler recognizes short runs and sizes merged ones."""

from __future__ import annotations

__all__ = ["RunCost"]

_DECAY = 0.8


class RunCost:
    """Seconds of processor a sample of one version of a model, smoothed over its last runs, each by its samples.

    Runs of many samples take less for each than runs of one: so a rate that was learned from single samples is too high for
    the first merged run, and right after it. Any thread may call; two at one moment may lose one run's figure.
    """

    __slots__ = ("_samples", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._samples = 0.0

    def expected(self, samples: int) -> float:
        """Seconds of a run of so many samples; 0 before the first was seen."""
        return self._seconds / self._samples * samples if self._samples else 0.0

    def learn(self, samples: int, seconds: float) -> None:
        """A run of so many samples took ``seconds`` of processor."""
        self._seconds = _DECAY * self._seconds + seconds
        self._samples = _DECAY * self._samples + samples
