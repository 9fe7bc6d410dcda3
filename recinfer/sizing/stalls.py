"""Records when a host's cores stood still: a sleeper on each core, in a process of its own, that notes when it wakes up late."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from recinfer.errors import UnavailableError

__all__ = ["Stall", "StallRecorder", "can_record"]

_SLEEP_S = 0.5e-3
_LATE_S = 0.3e-3
_MOST = 1_000_000
_WAIT_S = 60.0


@dataclass(frozen=True)
class Stall:
    """A core that stood still.

    Attributes:
        core: counted from 0 among those that the process may use.
        begin: ``time.perf_counter()``, or seconds of a simulation.
        seconds: for how long, to half a millisecond.
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
    """Records from entering to leaving its context; takes about a hundredth of each core.

    Attributes:
        stalls: what was seen, once it is left, in the order of their begins; stalls below 0.3 ms are not.
        seconds: for how long it recorded; ``cores``: how many.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.cores = len(os.sched_getaffinity(0))
        self._child = context.Process(target=_record, args=(sorted(os.sched_getaffinity(0)), there), daemon=True)
        self.stalls: tuple[Stall, ...] = ()
        self.seconds = self._began = 0.0

    def __enter__(self) -> StallRecorder:
        self._child.start()
        self._hear()
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        try:
            with suppress(OSError):
                self._pipe.send("stop")
            if error is None:
                found = (Stall(*each) for each in self._hear())
                self.stalls = tuple(sorted(found, key=lambda stall: stall.begin))
        finally:
            self._child.join(10)
            if self._child.is_alive():
                self._child.kill()
                self._child.join()

    def _hear(self) -> Iterable[tuple[int, float, float]]:
        try:
            if not self._pipe.poll(_WAIT_S):
                raise EOFError
            found: Iterable[tuple[int, float, float]] = self._pipe.recv()
        except (EOFError, OSError):
            raise UnavailableError("the recorder of stalls did not start or is gone; see stderr") from None
        return found


def _record(cores: list[int], pipe: Connection) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    found: list[tuple[int, float, float]] = []
    over = threading.Event()
    watchers = [threading.Thread(target=_watch, args=(at, core, found, over)) for at, core in enumerate(cores)]
    for watcher in watchers:
        watcher.start()
    pipe.send([])
    with suppress(EOFError):  # the parent is gone
        pipe.recv()
    over.set()
    for watcher in watchers:
        watcher.join()
    with suppress(OSError):
        pipe.send(found)


def _watch(at: int, core: int, found: list[tuple[int, float, float]], over: threading.Event) -> None:
    os.sched_setaffinity(0, {core})  # of this thread
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while not over.is_set():
        due = time.perf_counter() + _SLEEP_S
        time.sleep(_SLEEP_S)
        late = time.perf_counter() - due
        if late > _LATE_S and len(found) < _MOST:
            found.append((at, due, late))
