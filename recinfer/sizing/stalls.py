"""Records when a host's cores stood still: sleepers, a process on each core, that note when they wake up late."""

from __future__ import annotations

import multiprocessing
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from recinfer.errors import UnavailableError

__all__ = ["Stall", "StallRecorder", "can_record"]

_SLEEP_S = 2e-3  # each end of it takes the core from who has it: every half millisecond that was half of a p90
_LATE_S = 0.3e-3
_MOST = 1_000_000
_WAIT_S = 60.0


@dataclass(frozen=True)
class Stall:
    """A core that stood still.

    Attributes:
        core: counted from 0 among those that the process may use.
        begin: ``time.perf_counter()``, or seconds of a simulation.
        seconds: for how long.
    """

    core: int
    begin: float
    seconds: float


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
    """Records from entering to leaving its context; takes less than a hundredth of each core.

    A sleeper is due each 2 ms. Of a stall that it is late for, it knows the end; the begin is taken to be a millisecond before
    it was due, as it is on average of the long ones. A short one is seen when somebody is due meanwhile: of those of 1 ms a half.

    Attributes:
        stalls: what was seen, once it is left, in the order of their begins; sleepers that are less than 0.3 ms late saw none.
        seconds: for how long it recorded; ``cores``: how many.
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
        self.seconds = self._began = 0.0

    def __enter__(self) -> StallRecorder:
        for child in self._children:
            child.start()
        for pipe in self._pipes:
            _hear(pipe)
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        try:
            for pipe in self._pipes:
                with suppress(OSError):
                    pipe.send("stop")
            if error is None:
                found = [Stall(core, *each) for core, pipe in enumerate(self._pipes) for each in _hear(pipe)]
                self.stalls = tuple(sorted(found, key=lambda stall: stall.begin))
        finally:
            for child in self._children:
                child.join(10)
                if child.is_alive():
                    child.kill()
                    child.join()


def _hear(pipe: Connection) -> list[tuple[float, float]]:
    try:
        if not pipe.poll(_WAIT_S):
            raise EOFError
        found: list[tuple[float, float]] = pipe.recv()
    except (EOFError, OSError):
        raise UnavailableError("the recorder of stalls did not start or is gone; see stderr") from None
    return found


def _record(core: int, pipe: Connection) -> None:
    """Sleep on ``core`` until ``pipe`` says something; then send when one was late, and for how long."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    os.sched_setaffinity(0, {core})
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    found: list[tuple[float, float]] = []
    pipe.send([])
    said = select.poll()
    said.register(pipe, select.POLLIN)
    while not said.poll(0):  # or the parent is gone
        due = time.perf_counter() + _SLEEP_S
        time.sleep(_SLEEP_S)
        late = time.perf_counter() - due
        if late > _LATE_S and len(found) < _MOST:
            found.append((due - _SLEEP_S / 2, late + _SLEEP_S / 2))
    with suppress(OSError):
        pipe.send(found)
