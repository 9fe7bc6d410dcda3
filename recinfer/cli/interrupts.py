"""Signal handling of commands: what a process sets first, a Ctrl-C that Python would drop, and cleaning up at other signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["cleaning_up_at_signals", "end_at_hangup", "redelivering_interrupts", "set_first_handlers"]

_AGAIN_S = 0.01
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def set_first_handlers(arguments: Sequence[str]) -> None:
    """Install signal handlers before modules and archives are loaded, which takes from a second to many minutes.

    - SIGTERM ends process 1 of a container too, for which the system discards signals without a handler.
    - SIGHUP does not end a server that still loads. A server that reloads at SIGHUP reads all files once it serves; other
      servers call :func:`end_at_hangup`.

    Args:
        arguments: the command line's arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    if "serve" in arguments and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _ignore)


def end_at_hangup() -> None:
    """Let SIGHUP end this process again, unless the process was started with SIGHUP ignored (nohup)."""
    if signal.getsignal(signal.SIGHUP) is _ignore:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # the code that shells report for a process that a signal ended


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal in this process alone; workers would inherit SIG_IGN."""


@contextmanager
def redelivering_interrupts() -> Iterator[None]:
    """Inside the block, raise a Ctrl-C again that Python dropped because it arrived in a ``__del__`` or a callback of C
    code.

    Imports run hundreds of such callbacks (importlib releases its locks in them). Python prints "Exception ignored in
    ..." there and continues. A dropped Ctrl-C is raised again by SIGALRM a moment later, and the message is not
    printed. Outside the main thread the block has no effect, because only the main thread receives Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former_hook, former_alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def lost(what: sys.UnraisableHookArgs) -> None:
        if what.exc_type is not KeyboardInterrupt:
            former_hook(what)
            return
        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    def again(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not lost.__code__:
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # an exception cannot leave the hook either

    sys.unraisablehook = lost
    try:
        yield
    finally:
        sys.unraisablehook = former_hook
        if signal.getsignal(signal.SIGALRM) is again:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former_alarm)


@contextmanager
def cleaning_up_at_signals() -> Iterator[None]:
    """Inside the block, SIGTERM and SIGHUP raise KeyboardInterrupt, so that cleanup code runs; then the process ends by
    the signal.

    A second signal has no effect, and a signal that the process was started to ignore (nohup) is ignored. Outside the
    main thread the block has no effect, because other threads get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    got: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not got:
            got.append(number)
            raise KeyboardInterrupt

    kept = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, interrupt) for number in kept}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if got:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # a terminal that is gone; a stream that the command closed
                    stream.flush()
            os.kill(os.getpid(), got[0])
