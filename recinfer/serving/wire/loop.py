"""Event loops, and the process's one asyncio loop for gRPC servers, in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["STOP_SLACK_S", "new_loop", "off_loop", "run_on_loop", "run_start", "start_on_loop"]

STOP_SLACK_S = 30.0
"""Seconds that a server's stop may take beyond its grace period. Its waits for watchers, cancelled calls and connections end
after ten; the rest is for a machine whose cores other processes keep busy."""

T = TypeVar("T")
_INLINE_BYTES = 32 << 10  # a longer message is converted in a thread, so that the event loop stays free
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def new_loop() -> asyncio.AbstractEventLoop:
    """A new event loop: uvloop's where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_on_loop(work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run ``work`` on the process's loop, from any other thread, and wait for its result.

    grpc.aio has one completion queue per process: two loops in two threads wake each other needlessly and log errors, so
    all servers of a process share this loop. The loop starts with its first use and ends with the process.
    """
    return start_on_loop(work).result(timeout)


def start_on_loop(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start ``work`` on the process's loop, from any thread."""
    return asyncio.run_coroutine_threadsafe(work, _running())


def run_start(start: Coroutine[Any, Any, None], stop: Callable[[float], None]) -> None:
    """Run a server's ``start`` on the process's loop; after an error, ``stop`` the server with no grace period."""
    starting = start_on_loop(start)
    try:
        starting.result()
    except BaseException:
        wait([starting])  # a Ctrl-C ends the caller's wait alone
        stop(0.0)
        raise


async def off_loop(size: int, work: Callable[..., T], *args: object) -> T:
    """``work(*args)``, in a thread when ``size`` (bytes) is large."""
    if size <= _INLINE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = new_loop()
            threading.Thread(target=_loop.run_forever, name="recinfer-serving", daemon=True).start()
        return _loop
