"""Timings of lookups that are robust against disturbances: new requests, separate rounds, medians."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["Call", "Timings"]

Call = tuple[Callable[[KeyedJaggedTensor], object], Callable[[int], KeyedJaggedTensor]]
"""The timed function, and a function that makes request number n."""


class Timings:
    """Milliseconds of calls, measured in separate rounds.

    Every call gets a new request, made just before it, as in a server, so that caches hold nothing of an earlier use.
    The median of all calls of a name counts: low quantiles of short calls do not add up to those of long ones. Lookups
    of one thread are timed by its CPU clock, so that waiting for a busy
    processor does not count.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None, on_device: bool = False) -> None:
        self._synchronize = synchronize
        self._clock = time.perf_counter if on_device or torch.get_num_threads() > 1 else time.thread_time
        self._rounds: dict[Any, list[list[float]]] = {}

    def add(self, calls: Mapping[Any, Call], seconds: float, settle: float = 0.0) -> None:
        """Time each of ``calls`` for about ``seconds``, and at least twice, after ``settle`` seconds of the same call.

        A shared cache needs hundreds of calls to reach the steady state of a table's traffic.
        """
        torch.empty(
            31 << 20, dtype=torch.uint8
        )  # freed immediately, so that glibc keeps outputs on its heap, as in a server
        for name, (run, make) in calls.items():
            rounds = self._rounds.setdefault(name, [])
            before, times = sum(map(len, rounds)), list[float]()
            rounds.append(times)
            spent, number, settled, until = 0.0, 0, 0, time.perf_counter() + settle
            while not settled or time.perf_counter() < until:
                settled += 1
                run(make(-settled))
            self._synchronize()
            while number < 2 or (spent < seconds * 1e3 and number < 1000):
                request = make(before + len(times))
                begin = self._clock()
                output = run(request)
                self._synchronize()
                times.append((self._clock() - begin) * 1e3)
                del output, request
                spent, number = spent + times[-1], number + 1

    def ms(self, name: Any) -> float:
        """Milliseconds of the call ``name``."""
        return statistics.median(itertools.chain.from_iterable(self._rounds[name]))

    def disagreement(self) -> float:
        """Largest over smallest median of a name's rounds, the median of all names; 1 where none has two rounds."""
        medians = [[statistics.median(times) for times in rounds] for rounds in self._rounds.values()]
        factors = [max(of_name) / max(min(of_name), 1e-9) for of_name in medians if len(of_name) > 1]
        return statistics.median(factors) if factors else 1.0
