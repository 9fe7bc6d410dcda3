"""How many requests a run waits for. What is about to come cannot be seen, so it is learned from what came lately."""

from __future__ import annotations

__all__ = ["Pace"]

_MIN_PROBE, _MAX_PROBE = 8, 256
_HITS_BEFORE_GROWTH, _HITS_AT_FIRST = 8, 2


class Pace:
    """1 while requests come alone, else as many as came together lately, and a few more.

    Attributes:
        target: how many a run waits for now.
    """

    def __init__(self) -> None:
        self.target = 1
        self._alone = self._hits = 0
        self._needed = _HITS_AT_FIRST
        self._until_probe = _MIN_PROBE

    def goes_alone(self) -> bool:
        """Whether a request that finds nothing waiting is run without a wait; now and then one is not, as a probe."""
        if self.target > 1:
            return False
        self._alone += 1
        if self._alone < self._until_probe:
            return True
        self._alone, self.target = 0, 2
        return False

    @property
    def is_alone(self) -> bool:
        """Whether the next request is neither waited with nor a probe."""
        return self.target == 1 and self._alone + 1 < self._until_probe

    def reached(self) -> None:
        """As many came as were waited for."""
        self._hits += 1
        if self._hits >= self._needed:
            self._hits = 0
            self.target += max(1, self.target // 4)

    def missed(self, came: int) -> None:
        """The wait is over, and only ``came`` requests are there."""
        self._until_probe = (
            max(_MIN_PROBE, self._until_probe // 4) if came > 1 else min(_MAX_PROBE, self._until_probe * 2)
        )
        self._hits, self.target = 0, max(1, (self.target + came) // 2)
        self._needed = _HITS_BEFORE_GROWTH if came > 1 else _HITS_AT_FIRST
