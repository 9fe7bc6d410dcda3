"""How many servers the load asks for: the rule that Kubernetes' HorizontalPodAutoscaler has, on a gauge of requests."""

from __future__ import annotations

import math
from collections import deque

from recinfer.deploy.ray.spec import Bounds

__all__ = ["LoadFollower"]

_WINDOW_S = 10.0
_TOLERANCE = 0.1


class LoadFollower:
    """Follows the sum of a gauge over the servers of one kind.

    Args:
        target: of the gauge's mean: above it there should be more servers, below it fewer.
        cool_down: seconds; servers go when none of the numbers that were right within it needed them.
    """

    def __init__(self, target: float, cool_down: float) -> None:
        self._target, self._cool_down = target, cool_down
        self._sums: deque[tuple[float, float]] = deque()
        self._wanted: deque[tuple[float, int]] = deque()
        self._since: float | None = None

    def wanted(self, now: float, total: float, count: int, bounds: Bounds) -> int:
        """How many there should be.

        Args:
            now: ``time.monotonic()``.
            total: sum of the gauge. Not its mean, which says too much while servers start and take no load yet.
            count: how many there are, or will be when those that start have.
            bounds: what may be chosen.
        """
        if self._since is None:
            self._since = now
        self._sums.append((now, total))
        while self._sums[0][0] < now - _WINDOW_S:
            self._sums.popleft()
        if now - self._since < _WINDOW_S:  # nothing is known yet
            return count
        needed = sum(value for _, value in self._sums) / len(self._sums) / self._target
        right = count if abs(needed / count - 1.0) <= _TOLERANCE else math.ceil(needed)
        right = max(bounds.least, min(bounds.most, right, 2 * count))
        self._wanted.append((now, right))
        while self._wanted[0][0] < now - self._cool_down:
            self._wanted.popleft()
        if right > count:
            self._sums.clear()  # the next look is at what the new ones made of it
            self._since = now
            return right
        if now - self._wanted[0][0] < 0.9 * self._cool_down:  # not yet as long as that
            return count
        return min(count, max(number for _, number in self._wanted))
