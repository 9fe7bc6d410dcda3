"""What runs of each size have taken, so that a batcher knows which are short and how many requests may share one."""

from __future__ import annotations

from typing import Any

__all__ = ["LONGEST_RUN_S", "SMOOTHING", "RunTimes"]

SMOOTHING = 0.2
LONGEST_RUN_S = 50e-3
"""Of a merged run: it is over before those behind it give up, and merging gains no more by then."""

_OLD_RUNS = 16
_MAX_KEYS = 1024


class RunTimes:
    """Seconds of processor a sample, by lane and the power of two of a run's samples: runs of many take far less than as many of one.

    A run of more samples than were seen yet is expected to take as much more; it never takes longer than that. What else the
    machine did while a run was measured only adds to it. So a shorter time is believed at once, a longer one by and by; and
    a size that was found too long is tried again, else one bad moment would keep runs small for good.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[Any, int], float] = {}
        self._learned: dict[tuple[Any, int], int] = {}  # the number of the run that it was last learned from
        self._runs = 0

    def expected(self, lane: Any, samples: int) -> float:
        """Seconds of a run of that many samples; 0 where none of the lane was seen that has no more."""
        key = self._known(lane, samples)
        return 0.0 if key is None else self._rates.get(key, 0.0) * samples

    def may_share(self, lane: Any, samples: int) -> bool:
        """Whether requests of so many samples in all may share a run: it is not too long, or that was found a while ago.

        A run of one sample may be long in itself; then twice as long is not too long.
        """
        key = self._known(lane, samples)
        if key is None:
            return True
        limit = max(LONGEST_RUN_S, 2 * self._rates.get((lane, 1), 0.0))
        if self._rates.get(key, 0.0) * samples <= limit:
            return True
        return self._runs - self._learned.get(key, self._runs) > _OLD_RUNS

    def learn(self, lane: Any, samples: int, seconds: float) -> None:
        """A run of that many samples took ``seconds`` of its thread."""
        self._runs += 1
        if len(self._rates) > _MAX_KEYS:  # lanes of models that are gone
            self._rates.clear()
            self._learned.clear()
        key, rate = (lane, samples.bit_length()), seconds / max(samples, 1)
        before = self._rates.get(key, rate)
        self._rates[key] = rate if rate < before else before + SMOOTHING * (rate - before)
        self._learned[key] = self._runs

    def _known(self, lane: Any, samples: int) -> tuple[Any, int] | None:
        for size in range(samples.bit_length(), 0, -1):
            if (lane, size) in self._rates:
                return lane, size
        return None
