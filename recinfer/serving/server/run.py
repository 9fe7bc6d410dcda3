"""Serves in the main thread until a signal ends it."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from recinfer.serving.server.tuning import tune_process

if TYPE_CHECKING:
    from recinfer.serving.server.server import Server
    from recinfer.serving.server.shard_server import ShardServer

__all__ = ["serve"]

_SIGNAL_POLL_S = 0.05


def serve(
    server: Server | ShardServer,
    *,
    grace: float = 10.0,
    on_ready: Callable[[], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (Ctrl-C), then drain for up to ``grace`` seconds. Call from the main thread.

    Args:
        server: a server that has not started.
        on_ready: called once requests are accepted.
        on_hangup: called at each SIGHUP, which ends the process when this is None.
        stop: ends serving when it is set, as a signal does.
    """
    tune_process()
    # A signal handler runs in this thread, between any two of its steps. A handler that sets an Event could wait forever for
    # the Event's lock, which this thread may hold. Appending takes no lock.
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
        gc.unfreeze()  # Python's end frees no frozen object, of which Triton's classes complain
        for number, handler in before.items():
            signal.signal(number, handler)
