"""Threads that work for a thread which Ctrl-C may interrupt at any moment."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["Call", "Threads"]

T = TypeVar("T")


class Call(Generic[T]):
    """A call that a thread makes."""

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        self._function = function
        self._arguments = arguments
        self._ended: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def make(self) -> None:
        """Make the call in this thread."""
        try:
            self._ended.put((self._function(*self._arguments), None))
        except BaseException as error:
            self._ended.put((None, error))

    def result(self) -> T:
        """Wait for what the call returns, or raise what it raised. May be used once."""
        value, error = self._ended.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


class Threads:
    """A number of threads that make calls, in the order of their submission. A context manager.

    Not ``concurrent.futures``: its locks are taken by Python code, which Ctrl-C may interrupt between taking a lock and the block
    that gives it back. The lock then stays taken, and the end of the pool is waited for without end. The locks of SimpleQueue are
    taken and given back in C. For the same reason the threads are not started by ``threading``.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            _thread.start_new_thread(self._run, ())

    def submit(self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        """Have a thread call ``function(*arguments)``."""
        call = Call(function, *arguments)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Wait for the calls that have begun; those that have not are dropped."""
        try:
            while True:
                self._calls.get_nowait()
        except Empty:
            pass
        for _ in range(self._count):
            self._calls.put(None)
        for _ in range(self._count):
            self._ended.get()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
            del call  # frees the call's objects before the next call arrives
        self._ended.put(None)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
