"""The loads that serving costs are made of: which server, requests of how many samples, how many callers, and their means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from recinfer.sizing.probe import Load
from recinfer.sizing.stalls import Look, looks_between, pace_of

__all__ = [
    "BUSY_LARGE",
    "FEW",
    "FOUR",
    "LARGE",
    "LONE",
    "MANY",
    "ON_TIME",
    "PARTS",
    "RARE",
    "SMALL",
    "SOON",
    "Kind",
    "Means",
    "at_one_pace",
]

SMALL, LARGE = 1, 256
"""Samples a request."""
FEW = 16
"""Requests of a merged run in process."""
MANY, BUSY_LARGE = 32, 8
"""Callers that keep a server busy, with small and with large requests."""
SOON, RARE = -1, 0
"""In place of a number of callers: one that waits between two calls, a millisecond or five."""
LONE = (1, SOON, RARE)
"""All loads of one caller."""
FOUR, ON_TIME = 4, -2
"""Callers; in place of their number: one that sends at random moments, at so much of the rate of four."""
PARTS = 400
"""Of a distribution that is kept."""
_STALL = 3.0  # times the median: a lone call that takes longer was held up

Kind = tuple[str, int, int]
"""Which server, samples a request, callers."""


def at_one_pace(turns: Sequence[Load], looks: Sequence[Sequence[Look]]) -> tuple[list[Load], float]:
    """Turns of one kind of load as if the machine had always been as fast as in the middle one of them; and how fast that was
    (:func:`recinfer.sizing.stalls.pace_of`; 0: nobody looked).

    A machine is a tenth to a half slower some seconds later, for reasons below it, and costs are differences of loads. What a
    load itself does to the caches is the same in all turns of a kind, so it is no pace.

    Args:
        looks: of each core's sleeper (:class:`recinfer.sizing.stalls.StallRecorder`), the turns' times among them; or none.
    """
    paces = []
    for turn in turns:
        mine = [pace_of(looks_between(its, turn.begin, turn.begin + turn.seconds)) for its in looks]
        paces.append(statistics.fmean(mine) if all(mine) and mine else 0.0)
    known = [pace for pace in paces if pace]
    usual = statistics.median(known) if known else 0.0
    return [turn.times(usual / pace) if pace else turn for turn, pace in zip(turns, paces)], usual


class Means:
    """Seconds a request: medians over turns."""

    def __init__(self, turns: Sequence[Load]) -> None:
        def median(of: Callable[[Load], float]) -> float:
            return statistics.median(of(turn) for turn in turns)

        self.loop = median(lambda t: t.server.loop / t.answered)
        self.grpc = median(lambda t: t.server.grpc / t.answered)
        self.asks = median(lambda t: t.server.asks / t.answered)
        self.run = median(lambda t: t.server.runs / t.answered)
        self.io = median(lambda t: t.server.other / t.answered)
        self.client_loop = median(lambda t: t.client.loop / t.answered)
        self.client_grpc = median(lambda t: t.client.grpc / t.answered)
        self.client_io = median(lambda t: t.client.other / t.answered)
        self.runs = median(lambda t: t.runs / t.answered)
        self.cycle = median(lambda t: t.seconds / t.answered)
        self.ours = self.loop + self.run
        self.all = self.ours + self.grpc + self.asks + self.io
        self.latency = median(lambda t: float(np.nanmedian(t.latencies)))
        all_of = np.sort(np.concatenate([t.latencies[np.isfinite(t.latencies)] for t in turns]))
        usual = all_of[all_of <= _STALL * np.median(all_of)]
        self.spread = tuple(float(p.mean() / usual.mean()) for p in np.array_split(usual, min(PARTS, usual.size)))
        self.stalls = tuple(float(s) for s in all_of[usual.size :] - np.median(all_of))
        self.seconds = sum(t.seconds for t in turns)
        self.usual = float(usual.mean())
        self.wake = median(lambda t: (t.client.waited + t.server.waited) / max(t.client.turns + t.server.turns, 1.0))
