"""Helpers of the planner: units, messages, and searches over one variable."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.sharders import build_sharder_data_map, sharder_name
from recinfer.distributed.planner.model.topology import Storage
from recinfer.distributed.types.edges import placement

__all__ = [
    "BinarySearchPredicate",
    "LuusJaakolaSearch",
    "build_sharder_data_map",
    "bytes_to_gb",
    "bytes_to_mb",
    "gb_to_bytes",
    "mb_to_bytes",
    "placement",
    "prod",
    "reset_shard_rank",
    "sharder_name",
    "storage_repr_in_gb",
]


def bytes_to_gb(num_bytes: float) -> float:
    """Convert bytes to GiB."""
    return float(num_bytes) / 1024**3


def bytes_to_mb(num_bytes: float) -> float:
    """Convert bytes to MiB."""
    return float(num_bytes) / 1024**2


def gb_to_bytes(gb: float) -> int:
    """Convert GiB to bytes."""
    return int(gb * 1024**3)


def mb_to_bytes(mb: float) -> int:
    """Convert MiB to bytes."""
    return int(mb * 1024**2)


def prod(iterable: Iterable[int]) -> int:
    """Product of the factors."""
    return math.prod(iterable)


def reset_shard_rank(proposal: list[ShardingOption]) -> None:
    """Remove the ranks from a proposal."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Text of a storage in GB, for messages."""
    if storage is None:
        return ""
    return f"Storage(hbm = {round(bytes_to_gb(storage.hbm), 3)} GB, ddr = {round(bytes_to_gb(storage.ddr), 3)} GB)"


class BinarySearchPredicate:
    """A search for the largest x in [A, B] for which a monotone predicate holds, to within ``tolerance``.

    ``next(prior_result)`` returns the next x to try, given the result for the last one (ignored the first time); None
    when done.
    """

    def __init__(self, A: int, B: int, tolerance: int) -> None:
        self.left = A
        self.right = B
        self.tolerance = tolerance
        self._at: int | None = None

    def next(self, prior_result: bool) -> int | None:
        """The next point, or None."""
        if self._at is not None:
            if prior_result:
                self.left = self._at + 1
            else:
                self.right = self._at - 1
        if self.left > self.right or (self._at is not None and self.right - self.left < self.tolerance):
            return None
        self._at = self.left + (self.right - self.left) // 2
        return self._at


class LuusJaakolaSearch:
    """Minimises a noisy function of one variable on [A, B]: random steps in a window that shrinks on failure.

    R. Luus and T. H. I. Jaakola, "Optimization by direct search and systematic reduction of the size of search
    region", AIChE Journal 19(4), 1973. Deterministic for a seed.
    """

    def __init__(self, A: float, B: float, max_iterations: int, seed: int = 42, left_cost: float | None = None) -> None:
        self.left = A
        self.right = B
        self.iteration = -1
        self.max_iterations = max_iterations
        self._random = random.Random(seed)
        self._window = B - A
        self._x: float | None = None
        self._best: tuple[float, float] = (A, math.inf if left_cost is None else left_cost)

    def clamp(self, x: float) -> float:
        """``x`` clamped to the interval."""
        return min(max(x, self.left), self.right)

    def uniform(self, A: float, B: float) -> float:
        """A random number in [A, B]."""
        return self._random.uniform(A, B)

    def shrink_right(self, B: float) -> None:
        """Set the upper end of the interval to ``B``."""
        self.right = max(min(B, self.right), self.left)
        self._window = min(self._window, self.right - self.left)

    def next(self, fy: float) -> float | None:
        """The next point to evaluate, given the value at the last one; None when the iterations are spent."""
        if self._x is not None:
            if fy < self._best[1]:
                self._best = (self._x, fy)
            else:
                self._window *= 0.95
        self.iteration += 1
        if self.iteration >= self.max_iterations:
            return None
        if self._x is None:
            self._x = self.uniform(self.left, self.right)
        else:
            self._x = self.clamp(self._best[0] + self.uniform(-self._window, self._window))
        return self._x

    def best(self) -> tuple[float, float]:
        """(x, value) of the best point so far."""
        return self._best
