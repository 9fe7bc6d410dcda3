"""What disturbs a simulated core: when it stands still, and when somebody else wants it, drawn as far as they are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

__all__ = ["Comings", "Stalls", "held_up"]

_SLOW_STEP_S = 0.25e-3
_DRAWN = 256  # at a time
_FAR_S = 1.0  # nobody looked for longer: what was in between is passed over


class Comings:
    """Things that begin at random, so many a second, and take so long: a Poisson process with durations.

    It has no memory: where nobody looked for a while it goes on shortly before now, undrawn what was in between.

    Args:
        per_s: how many, on average.
        values: (seconds, share of them that is lost), one of which each is.

    Attributes:
        due: when the next one begins; infinite where there is none.
        seconds: that it takes.
        lost: its share that is lost.
    """

    __slots__ = ("_drawn", "_longest", "_mean_s", "_per_s", "_random", "_values", "due", "lost", "seconds")

    def __init__(self, random: np.random.Generator, per_s: float, values: Sequence[tuple[float, float]]) -> None:
        self._random, self._per_s, self._values = random, per_s, values
        self._longest = max((seconds for seconds, _ in values), default=0.0)
        self._mean_s = sum(seconds for seconds, _ in values) / max(len(values), 1)
        self._drawn: Iterator[tuple[float, int]] = iter(())
        self.due = 0.0 if per_s and values else math.inf
        self.seconds = self.lost = 0.0
        if self.due == 0.0:
            self.take()

    def take(self) -> None:
        """On to the next one."""
        gap, which = next(self._drawn, (0.0, -1))
        if which < 0:
            gaps = self._random.exponential(1.0 / self._per_s, _DRAWN).tolist()
            self._drawn = zip(gaps, self._random.integers(len(self._values), size=_DRAWN).tolist(), strict=True)
            gap, which = next(self._drawn)
        self.due += gap
        self.seconds, self.lost = self._values[which]

    def skip(self, now: float) -> float:
        """Pass over what was long before ``now``; the seconds that these took, on average."""
        passed = now - _FAR_S - self._longest - self.due
        if not passed > 0.0:
            return 0.0
        self.due += passed
        self.take()
        return passed * self._per_s * self._mean_s


class Stalls:
    """For how long a core has stood still: of stalls that come, and of those that it is told.

    A core that loses only a share of its work for a while stands still again and again for a moment.
    """

    __slots__ = ("_begin", "_comings", "_end", "_over", "_parts", "due")

    def __init__(self, comings: Comings | None = None) -> None:
        self._comings = comings
        self._over = 0.0  # seconds of those that are over
        self._begin = self._end = -1.0
        self._parts: list[tuple[float, float]] = []
        self.due = math.inf if comings is None else comings.due

    def begin(self, now: float, seconds: float) -> None:
        """It stands still from ``now`` on."""
        if now >= self._end:
            self._over += max(self._end - self._begin, 0.0)
            self._begin = self._end = now
        self._end = max(self._end, now + seconds)

    def until(self, now: float) -> float:
        """For how long it has stood still so far; to be asked of times that ascend."""
        if self.due <= now:
            self._draw(now)
        return self._over + max(min(now, self._end) - self._begin, 0.0)

    def _draw(self, now: float) -> None:
        comings, parts = self._comings, self._parts
        assert comings is not None
        if not parts:
            comings.skip(now)
        while self.due <= now:
            # What began before the next part does comes first.
            while comings.due <= now and (not parts or comings.due <= parts[0][0]):
                for part in held_up(comings.due, comings.seconds, comings.lost):
                    heappush(parts, part)
                comings.take()
            if parts and parts[0][0] <= now:
                self.begin(*heappop(parts))
            self.due = min(comings.due, parts[0][0] if parts else math.inf)


def held_up(begin: float, seconds: float, lost: float) -> Iterator[tuple[float, float]]:
    """When a core that loses that share of its work for so long stands still, and for how many seconds each time."""
    parts = 1 if lost >= 1 else max(round(seconds / _SLOW_STEP_S), 1)
    return ((begin + part * seconds / parts, lost * seconds / parts) for part in range(parts))
