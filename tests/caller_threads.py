"""Threads that call a server until the end of a block."""

from __future__ import annotations

import threading
from typing import Self

__all__ = ["CallerThreads"]


class CallerThreads:
    """A thread for each of ``count`` callers, which calls again and again until ``self._stop`` is set, at the end of the block.

    A subclass calls the constructor, and has ``_call``.
    """

    def __init__(self, count: int) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(count)]

    def _call(self, number: int) -> None:
        """Call until ``self._stop`` is set; ``number`` of the caller."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()
