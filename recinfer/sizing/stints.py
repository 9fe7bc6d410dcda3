"""Records what programs and kernel threads that are not ours had of the cores, from the kernel's own record of switches."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

__all__ = ["Stint", "StintRecorder", "can_record_switches", "stints_of"]

_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTR_BYTES = 128
_SOFTWARE, _DUMMY = 1, 9  # a counter that counts nothing: what is asked for are the records that come with it
_TID, _TIME = 1 << 1, 1 << 2  # what each record says
_TASKS, _ALL_SAY, _A_CLOCK, _SWITCHES, _DISABLED = 1 << 13, 1 << 18, 1 << 25, 1 << 26, 1 << 0
_CLOCK_AT = 92  # of the attribute, where the number of the clock is
_NO_GROUP, _CLOSE_ON_EXEC = -1, 8
_ENABLE, _DISABLE = 0x2400, 0x2401
_HEAD_AT = 1024  # of the first page, where the kernel says how many bytes it has written
_FORK, _SWITCH = 7, 15
_OUT, _PREEMPTED = 1 << 13, 1 << 14
_RING_BYTES = 16 << 20  # of a core: some twenty seconds of 10,000 switches


@dataclass(frozen=True)
class Stint:
    """What a thread that is not ours needed of a core from when it woke up until it slept again.

    Attributes:
        core: that it had first, counted from 0 among those that the process may use.
        begin: ``time.perf_counter()`` when it had it, or seconds of a simulation.
        seconds: that it ran, without those in which others had been given its core.
        pid: of its process.
    """

    core: int
    begin: float
    seconds: float
    pid: int = 0


@dataclass(frozen=True)
class Switch:
    """A thread got a core, or lost it; or, with a ``parent``, a process began.

    Attributes:
        time: seconds of the monotonic clock.
        pid, tid: of process and thread; 0: nobody.
        out: it lost the core; ``ready``: while it had more to do.
    """

    time: float
    core: int
    pid: int
    tid: int
    out: bool = False
    ready: bool = False
    parent: int | None = None


def can_record_switches() -> bool:
    """Whether this system tells this process who has its cores: Linux, as root or with CAP_PERFMON."""
    try:
        os.close(_open(min(os.sched_getaffinity(0))))
    except (OSError, AttributeError):
        return False
    return True


class StintRecorder:
    """Records from entering to leaving its context, or until what it keeps for a core is full. The kernel writes
    some 64 bytes a switch, and nobody wakes up for that: so it can run while something is measured.

    Ours are this process and all that it has started, also meanwhile.

    Args:
        strangers: processes of ours that count as others'.

    Attributes:
        stints: what others had, once it is left, in the order of their begins.
        seconds: for how long it recorded; ``cores``: how many.

    Raises:
        OSError: on entering, where :func:`can_record_switches` is False.
    """

    def __init__(self, strangers: Iterable[int] = ()) -> None:
        self._strangers = set(strangers)
        self._of = sorted(os.sched_getaffinity(0))
        self.cores = len(self._of)
        self.stints: tuple[Stint, ...] = ()
        self.seconds = 0.0
        self._rings: list[tuple[int, mmap.mmap]] = []

    def __enter__(self) -> StintRecorder:
        try:
            for core in self._of:
                fd = _open(core)
                self._rings.append((fd, mmap.mmap(fd, mmap.PAGESIZE + _RING_BYTES)))
        except OSError:
            self._close()
            raise
        self._mine = _with_children(os.getpid()) - self._strangers
        self._began = time.clock_gettime(time.CLOCK_MONOTONIC)
        for fd, _ in self._rings:
            _control(fd, _ENABLE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for fd, _ in self._rings:
            _control(fd, _DISABLE)
        until = time.clock_gettime(time.CLOCK_MONOTONIC)
        to_counter = time.perf_counter() - time.clock_gettime(time.CLOCK_MONOTONIC)  # of Linux they are the same clock
        try:
            switches = [list(_read(core, ring)) for core, (_, ring) in enumerate(self._rings)]
            for (_, ring), of_core in zip(self._rings, switches):
                if _written(ring) > _RING_BYTES - 4096 and of_core:
                    until = min(until, of_core[-1].time)  # it is full: others may have gone on
            self.seconds = until - self._began
            found = stints_of((switch for of_core in switches for switch in of_core), self._mine)
            self.stints = tuple(
                replace(stint, begin=stint.begin + to_counter) for stint in found if stint.begin < until
            )
        finally:
            self._close()

    def _close(self) -> None:
        for fd, ring in self._rings:
            ring.close()
            os.close(fd)
        self._rings = []


def stints_of(switches: Iterable[Switch], mine: Iterable[int]) -> list[Stint]:
    """What threads of other processes than ``mine``, and than those that these start, needed; in the order of their begins."""
    ours = {0, *mine}  # 0: nobody, or somebody who cannot be seen from here
    has: dict[int, float] = {}  # since when a thread has a core
    begun: dict[int, Stint] = {}
    found: list[Stint] = []
    for switch in sorted(switches, key=lambda switch: switch.time):
        if switch.parent is not None:
            if switch.parent in ours:
                ours.add(switch.pid)
            continue
        if switch.pid in ours:
            continue
        if not switch.out:
            has[switch.tid] = switch.time
            begun.setdefault(switch.tid, Stint(switch.core, switch.time, 0.0, switch.pid))
        elif switch.tid in has:
            before = begun[switch.tid]
            now = replace(before, seconds=before.seconds + switch.time - has.pop(switch.tid))
            if switch.ready:
                begun[switch.tid] = now
            else:
                found.append(now)
                del begun[switch.tid]
    found += [stint for stint in begun.values() if stint.seconds]  # it was left while they were not over
    return sorted(found, key=lambda stint: stint.begin)


def _with_children(pid: int) -> set[int]:
    """A process and all that come from it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found, before = {pid}, 0
    while len(found) > before:
        before = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _open(core: int) -> int:
    """A record of the switches of a core, not begun yet."""
    number = _SYSCALLS.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        raise OSError("who has a core is not known on this system")
    flags = _DISABLED | _TASKS | _ALL_SAY | _A_CLOCK | _SWITCHES
    attribute = bytearray(_ATTR_BYTES)
    struct.pack_into("=IIQQQQQ", attribute, 0, _SOFTWARE, _ATTR_BYTES, _DUMMY, 0, _TID | _TIME, 0, flags)
    struct.pack_into("=i", attribute, _CLOCK_AT, time.CLOCK_MONOTONIC)
    buffer = ctypes.create_string_buffer(bytes(attribute), _ATTR_BYTES)
    fd: int = _libc().syscall(number, buffer, -1, core, _NO_GROUP, _CLOSE_ON_EXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open: " + os.strerror(ctypes.get_errno()))
    return fd


def _control(fd: int, what: int) -> None:
    if _libc().ioctl(fd, what, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _written(ring: Sequence[int] | mmap.mmap) -> int:
    written: int = struct.unpack_from("=Q", ring, _HEAD_AT)[0]  # type: ignore[arg-type]
    return written


def _read(core: int, ring: mmap.mmap) -> Iterator[Switch]:
    """The records of one core; what the kernel had no room for it has left out."""
    data = ring[mmap.PAGESIZE : mmap.PAGESIZE + _written(ring)]
    at = 0
    while at + 8 <= len(data):
        kind, flags, size = struct.unpack_from("=IHH", data, at)
        if kind == _SWITCH:
            pid, tid, nanoseconds = struct.unpack_from("=iiQ", data, at + size - 16)
            yield Switch(nanoseconds / 1e9, core, pid, tid, bool(flags & _OUT), bool(flags & _PREEMPTED))
        elif kind == _FORK:
            pid, parent, tid, _, nanoseconds = struct.unpack_from("=iiiiQ", data, at + 8)
            if pid == tid:  # else a thread began
                yield Switch(nanoseconds / 1e9, core, pid, tid, parent=parent)
        at += size
