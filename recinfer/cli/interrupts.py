"""Signal handling of commands: a Ctrl-C that Python would drop, and cleaning up on SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["cleaning_up_on_sigterm", "never_lost"]

_AGAIN_S = 0.01


@contextmanager
def never_lost() -> Iterator[None]:
    """Inside the block, raise a Ctrl-C again that Python dropped because it arrived in a ``__del__`` or a callback of C
    code.

    Imports run hundreds of such callbacks (importlib releases its locks in them). Python prints "Exception ignored in
    ..." there and continues. A dropped Ctrl-C is raised again by SIGALRM a moment later, and the message is not
    printed. Does nothing outside the main thread, because only the main thread receives Ctrl-C.
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
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # nothing can be raised out of the hook either

    sys.unraisablehook = lost
    try:
        yield
    finally:
        sys.unraisablehook = former_hook
        if signal.getsignal(signal.SIGALRM) is again:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former_alarm)


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """Inside the block, SIGTERM raises KeyboardInterrupt, so that cleanup code runs; then the process ends by SIGTERM.

    A second SIGTERM has no effect. Does nothing outside the main thread, which has no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        if not terminated:
            terminated = True
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
        if terminated:
            sys.stdout.flush()
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)
