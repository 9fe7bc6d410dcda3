"""Serves in the main thread until a signal ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

from recinfer.serving.server.tuning import tune_process

__all__ = ["serve"]

_SIGNAL_POLL_S = 0.05


class _AnyServer(Protocol):
    """A Server or a ShardServer."""

    def start(self) -> object:
        """Bind and accept requests."""
        ...

    def stop(self, grace: float) -> None:
        """Let running requests end for up to ``grace`` seconds, then close."""
        ...


def serve(
    server: _AnyServer,
    *,
    grace: float = 10.0,
    on_ready: Callable[[], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (Ctrl-C), then drain for up to ``grace`` seconds. Call from the main thread.

    Args:
        server: a Server or a ShardServer that has not started.
        on_ready: called once requests are accepted.
        on_hangup: called at each SIGHUP, which ends the process when this is None.
        stop: set by someone else to end serving, as a signal does.
    """
    tune_process()
    # The handler runs in this thread, between any two steps of it: were it to set an Event that this thread is about to
    # wait for, it could find the Event's lock taken by its own thread, for ever. Appending takes no lock.
    signalled: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _: signalled.append(got))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    if on_hangup is not None:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: on_hangup())
    try:
        server.start()
        if on_ready is not None:
            on_ready()
        while not (signalled or (stop is not None and stop.is_set())):
            time.sleep(_SIGNAL_POLL_S)
    finally:
        server.stop(grace)
        for number, handler in before.items():
            signal.signal(number, handler)
