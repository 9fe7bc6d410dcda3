"""Records when a host's cores stood still: sleepers, a process on each core, that note when they wake up late."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import itemgetter
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import UnavailableError

__all__ = [
    "Look",
    "Stall",
    "StallRecorder",
    "can_record",
    "looks_between",
    "pace_of",
    "slowness_of",
    "stalls_of",
]

_SLEEP_S = 4e-3  # each end of it takes the core from who has it: every half millisecond that was half of a p90
_LATE_S = 0.3e-3
_SLOW = 1.3  # times what a core needs on average, which is what costs are measured at
_SOME = {f"name {i}": [i, str(i), {"share": i / 7}] for i in range(6)}
_FASTEST = 0.05  # of all looks are as fast as a core that is nobody else's
_BROKEN_OFF = 2.0  # times the usual: who took longer was broken off
_MOST = 1_000_000
_WAIT_S = 60.0

Look = tuple[float, float, float, float]
"""Of a sleeper that woke up: when it was due, by how much it was late, how long the same work took it the second time, and the
first.
"""


@dataclass(frozen=True)
class Stall:
    """A core that stood still, or was slow.

    Attributes:
        core: counted from 0 among those that the process may use.
        begin: ``time.perf_counter()``, or seconds of a simulation.
        seconds: for how long.
        lost: share of its work that it did not do meanwhile: 1 where it stood still.
    """

    core: int
    begin: float
    seconds: float
    lost: float = 1.0


def can_record() -> bool:
    """Whether this system lets a thread have a core of its choice, before all others: only then is it not others' work that a
    sleeper is late for.
    """
    if not hasattr(os, "sched_setscheduler"):
        return False
    here = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, *here)
    except OSError:
        return False
    return True


class StallRecorder:
    """Records from entering to leaving its context; takes 4 % of each core: little work, but nothing of it in the caches.

    A sleeper is due each 4 ms. Of a stall that it is late for, it knows the end; the begin is taken to be half of that before
    it was due, as it is on average of the long ones. A short one is seen when somebody is due meanwhile: of those of 1 ms a
    quarter. Each time it does the same small work twice: where the second time takes longer than usual three times in a row, or
    nearly, the core is slow, as it is when the hypervisor gives the other half of it to somebody else. The first time nothing of
    it is in the caches, as little is of what calls need; both times together are the pace, and what servers take changes with it.

    Attributes:
        stalls: what was seen, once it is left, in the order of their begins; sleepers that are less than 0.3 ms late saw none.
        seconds: for how long it recorded; ``cores``: how many.
        looks: what each core's sleeper saw, for :func:`stalls_of` and :func:`pace_of` of a part of it.
        pids: of the sleepers.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        self.cores = len(cores)
        self._pipes: list[Connection] = []
        self._children = []
        for core in cores:
            pipe, there = context.Pipe()
            self._pipes.append(pipe)
            # A process each: threads of one would wait for its interpreter, and take that for a stall.
            self._children.append(context.Process(target=_record, args=(core, there), daemon=True))
        self.stalls: tuple[Stall, ...] = ()
        self.looks: tuple[list[Look], ...] = ()
        self.pids: tuple[int, ...] = ()
        self.seconds = self._began = 0.0

    def __enter__(self) -> StallRecorder:
        for child in self._children:
            child.start()
        for pipe in self._pipes:
            _hear(pipe)
        self.pids = tuple(child.pid for child in self._children if child.pid is not None)
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        try:
            for pipe in self._pipes:
                with suppress(OSError):
                    pipe.send("stop")
            if error is None:
                self.looks = tuple(_hear(pipe) for pipe in self._pipes)
                found = [stall for core, its in enumerate(self.looks) for stall in stalls_of(core, its)]
                self.stalls = tuple(sorted(found, key=lambda stall: stall.begin))
        finally:
            for child in self._children:
                child.join(10)
                if child.is_alive():
                    child.kill()
                    child.join()


def stalls_of(core: int, looks: Sequence[Look]) -> list[Stall]:
    """What the sleeper of a core saw: moments at which the core stood still, and then times for which it was slow."""
    found = _late_of(core, looks)
    if len(looks) < 3:
        return found
    smooth = _smooth(looks)
    ratios = smooth / smooth.mean()
    slow, half = np.flatnonzero(ratios > _SLOW), _SLEEP_S / 2
    for phase in np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1) if slow.size else ():
        begin, end = looks[phase[0] + 1][0] - half, looks[phase[-1] + 1][0] + half
        found.append(Stall(core, begin, end - begin, float(1 - 1 / ratios[phase].mean())))
    return found


def _late_of(core: int, looks: Sequence[Look]) -> list[Stall]:
    """Moments at which the core stood still."""
    half = _SLEEP_S / 2
    return [Stall(core, due - half, late + half) for due, late, *_ in looks if late > _LATE_S]


def slowness_of(looks: Sequence[Sequence[Look]]) -> tuple[list[Stall], float]:
    """What the sleepers of all cores saw, look by look: a core's other half can be another virtual machine's for milliseconds at a
    time, and all that it runs takes up to 1.7 times as long meanwhile.

    Returns:
        When cores stood still or were slower than at their fastest, each for as long as one look is from the next; and how many
        times longer than then they took for their work on average. No looks: nothing, and 1.
    """
    every = [second for its in looks for _, _, second, _ in its]
    if not every:
        return [], 1.0
    least = float(np.quantile(every, _FASTEST))
    most, half = _BROKEN_OFF * statistics.median(every), _SLEEP_S / 2
    found = [stall for core, its in enumerate(looks) for stall in _late_of(core, its)]
    for core, its in enumerate(looks):
        for (due, _, second, _), (then, *_) in zip(its, [*its[1:], (its[-1][0] + _SLEEP_S, 0.0)] if its else []):
            if second > least:
                found.append(Stall(core, due - half, then - due, 1 - least / min(second, most)))
    return found, float(np.clip(every, least, most).mean()) / least


def looks_between(looks: Sequence[Look], begin: float, end: float) -> Sequence[Look]:
    """Those that were due from ``begin`` until before ``end``, of one core's."""
    first, last = (bisect_left(looks, at, key=itemgetter(0)) for at in (begin, end))
    return looks[first:last]


def pace_of(looks: Sequence[Look]) -> float:
    """Seconds that the small work took a core on average, both times: what servers take changes by about the same share. 0 where
    nobody looked three times.

    Measured on one virtual machine, of 25 loads in 15 to 24 rounds: CPU of a request by that, slope 0.98 and 0.78, correlation
    0.84; by the second time alone 0.99 and 1.21, 0.76.
    """
    if len(looks) < 3:
        return 0.0
    both = np.array([second + first for _, _, second, first in looks])
    return float(np.minimum(both, _BROKEN_OFF * np.median(both)).mean())


def _smooth(looks: Sequence[Look]) -> NDArray[np.float64]:
    """Medians of three: what took long once was broken off."""
    took = np.array([took for _, _, took, _ in looks])
    found: NDArray[np.float64] = np.median(np.lib.stride_tricks.sliding_window_view(took, 3), axis=1)
    return found


def _hear(pipe: Connection) -> list[Look]:
    try:
        if not pipe.poll(_WAIT_S):
            raise EOFError
        found: list[Look] = pipe.recv()
    except (EOFError, OSError):
        raise UnavailableError("the recorder of stalls did not start or is gone; see stderr") from None
    return found


def _record(core: int, pipe: Connection) -> None:
    """Sleep and look on ``core`` until ``pipe`` says something; then send what was seen."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    os.sched_setaffinity(0, {core})
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    looks: list[Look] = []
    pipe.send([])
    said = select.poll()
    said.register(pipe, select.POLLIN)
    while not said.poll(0):  # or the parent is gone
        due = time.perf_counter() + _SLEEP_S
        time.sleep(_SLEEP_S)
        late = time.perf_counter() - due
        first = time.perf_counter()
        _work()
        second = time.perf_counter()
        _work()
        if len(looks) < _MOST:
            looks.append((due, late, time.perf_counter() - second, second - first))
    with suppress(OSError):
        pipe.send(looks)


def _work() -> object:
    """What takes a core that is shared twice as long; a loop of sums, for which little code is needed, takes a fifth more."""
    return json.loads(json.dumps(_SOME))
