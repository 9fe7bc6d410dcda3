"""Measures contenders in turns in every round, so that noise affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["side_by_side"]


def side_by_side(
    contenders: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, rounds: int = 15
) -> dict[str, float]:
    """Median time of one call of each contender, in microseconds.

    Args:
        contenders: name -> call.
        seconds: about how long to spend in all.
        rounds: turns of each; one turn runs as many calls as its share of the time allows, at least one.
    """
    calls: dict[str, int] = {}
    share = seconds / (len(contenders) * rounds)
    for name, call in contenders.items():
        call()
        start = time.perf_counter()
        call()
        calls[name] = max(1, min(2000, int(share / max(time.perf_counter() - start, 1e-7))))
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            turns[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return {name: statistics.median(times) for name, times in turns.items()}
