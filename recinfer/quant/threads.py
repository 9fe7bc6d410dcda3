"""Splits a lookup over several threads where measured times show that this is faster.

FBGEMM's CPU operator runs on one thread and releases the interpreter lock. It allocates its output, so each part is
copied to its columns of the whole output. Lookups with one id per bag therefore seldom gain (the output is most of the
work), and bags of many ids do.

Shape suffixes: F features, B batch, N ids, D output columns.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from recinfer.errors import ConfigError
from recinfer.threads import Threads

__all__ = ["SplitLookup", "Trial"]

_LEAST_IDS = 16384
"""A lookup of fewer ids is never split: it takes less than waking a thread and copying (measured: 65 to 95 us plus 1 ns
per byte)."""
_TRIALS = 4  # timed calls of each way before the faster way is kept
_AGAIN = 128  # every so many lookups of a size the slower way is timed again: the machine's load changes
_CLEARLY = 0.9  # a split must win by this much, so that noise never makes a lookup slower
_KEEP = 0.75  # weight of a way's running time; the newest measurement has the rest


class Trial:
    """Finds the faster of two methods for each size of work: times both a few times, then uses the faster one."""

    def __init__(self) -> None:
        self._seconds: dict[object, list[float]] = {}  # size -> running seconds of (one thread, split)
        self._calls: dict[object, int] = {}

    def choose(self, size: object) -> bool:
        """Whether to split a lookup of this ``size``."""
        calls = self._calls.get(size, 0)
        self._calls[size] = calls + 1
        one, split = self._seconds.get(size, (0.0, 0.0))
        if calls < 2 * _TRIALS or not one or not split:  # not timed: a lookup that failed, or has not ended yet
            return calls % 2 == 1
        return (split < _CLEARLY * one) is (calls % _AGAIN != 0)

    def record(self, size: object, split: bool, seconds: float) -> None:
        """Record the time of a lookup."""
        known = self._seconds.setdefault(size, [0.0, 0.0])
        # The first of each way warms it up: pages, threads.
        fresh = self._calls.get(size, 0) <= 4
        known[split] = seconds if fresh or not known[split] else _KEEP * known[split] + (1 - _KEEP) * seconds

    def kept(self) -> dict[object, bool]:
        """Size -> whether lookups of that size are split."""
        return {size: split < _CLEARLY * one for size, (one, split) in self._seconds.items() if one and split}


_pools: dict[int, Threads] = {}  # by their number of threads


def _pool(threads: int) -> Threads:
    """The process's threads for lookups."""
    pool = _pools.get(threads)
    if pool is None:
        made = Threads(threads)
        pool = _pools.setdefault(threads, made)
        if pool is not made:  # another thread was faster
            made.close()
    return pool


@atexit.register
def _close() -> None:
    """Let the parts end that Ctrl-C has left: they run code of libraries that are about to be unloaded."""
    while _pools:
        _pools.popitem()[1].close()


os.register_at_fork(after_in_child=_pools.clear)  # threads do not survive a fork


class SplitLookup:
    """Runs an operator over F features as runs of neighbouring features, one run per thread.

    Args:
        threads: number of threads, including the caller's; 2 or more.
        widths: output columns of each feature.
        part: ``part(first, last)`` returns the operator over features ``first:last``, which takes all ids and the
            offsets of its
            features, and returns ``[B, sum of their widths]``.
        dtype: of the output.
        trial: stores the measured times; a new one by default.

    Raises:
        ConfigError: fewer than 2 threads.
    """

    def __init__(
        self,
        threads: int,
        widths: Sequence[int],
        part: Callable[[int, int], Callable[[Tensor, Tensor, Tensor | None], Tensor]],
        dtype: torch.dtype,
        trial: Trial | None = None,
    ) -> None:
        if threads < 2:
            raise ConfigError(f"threads: got {threads}; a split lookup needs 2 or more")
        self.threads = min(threads, len(widths))
        self._others = threads - 1  # one pool for all lookups of a process, however many features they have
        self.trial = trial or Trial()
        self._columns = [0]
        for width in widths:
            self._columns.append(self._columns[-1] + width)
        self._part = lru_cache(maxsize=256)(part)
        self._dtype = dtype

    def wants(self, indices: Tensor) -> bool:
        """Whether a lookup of these ids is large enough to consider a split."""
        return indices.numel() >= _LEAST_IDS and self.threads > 1

    def __call__(
        self,
        whole: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """``whole(indices, offsets, weights)``, split when that has been faster for such sizes."""
        batch = (offsets.numel() - 1) // (len(self._columns) - 1)
        size = (indices.numel().bit_length(), batch.bit_length())
        split = self.trial.choose(size)
        start = time.perf_counter()
        out_BD = self.split(indices, offsets, weights, batch) if split else whole(indices, offsets, weights)
        self.trial.record(size, split, time.perf_counter() - start)
        return out_BD

    def split(self, indices: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
        """Run split over all threads, without considering measured times.

        An error is raised once no thread works on this lookup any more. Ctrl-C is raised at once: the parts that still run
        write to a result that nobody gets.
        """
        cuts = self._cuts(offsets, batch)
        out_BD = torch.empty((batch, self._columns[-1]), dtype=self._dtype)
        inference = torch.is_inference_mode_enabled()  # each thread has its own

        def run(first: int, last: int) -> None:
            with torch.inference_mode(inference):
                bags = offsets[first * batch : last * batch + 1]
                found = self._part(first, last)(indices, bags, weights)
                out_BD[:, self._columns[first] : self._columns[last]].copy_(found)

        runs = list(pairwise(cuts))
        pool = _pool(self._others)
        others = [pool.submit(run, first, last) for first, last in runs[1:]]
        ends: list[Callable[[], None]] = [partial(run, *runs[0]), *(other.result for other in others)]
        errors = []
        for end in ends:
            try:
                end()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return out_BD

    def _cuts(self, offsets: Tensor, batch: int) -> list[int]:
        """Positions that split the features into runs with about equal bytes of rows and output."""
        ids_F = torch.diff(offsets[::batch]).tolist()
        widths = [stop - start for start, stop in pairwise(self._columns)]
        costs = [ids * (64 + width) + 4 * batch * width for ids, width in zip(ids_F, widths)]
        total, done, cuts = sum(costs), 0, [0]
        for feature, cost in enumerate(costs):
            if done + cost / 2 >= total * len(cuts) / self.threads and feature > cuts[-1] and len(cuts) < self.threads:
                cuts.append(feature)
            done += cost
        return [*cuts, len(costs)]
