"""Ctrl-C that Python would lose: one that lands in a ``__del__`` or a callback of C code, which nothing can be raised out of."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["never_lost"]

_AGAIN_S = 0.01


@contextmanager
def never_lost() -> Iterator[None]:
    """Within, a Ctrl-C that could not be raised where it landed is raised a moment later, and nothing is said of the first.

    Imports alone run such callbacks by the hundred (importlib drops its locks in them), and so do destructors. Python
    prints "Exception ignored in ..." there and goes on as if nobody had asked it to stop. Uses SIGALRM from a lost one on;
    does nothing outside the main thread, which has no Ctrl-C.
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
