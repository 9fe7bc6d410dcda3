"""Questions over a way to a server, for the tests of each kind of way."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from recinfer.serving.server.serial_connection import Asked, Way

LONG = 60.0
MUCH = 20 << 20

End = tuple["bytes | None", str, str]


class Answers:
    """What is asked, and when it is answered."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.go_on = threading.Event()

    def each(self, question: bytes, reply: Callable[[bytes], None]) -> None:
        self.asked.put(question)
        if question == b"fail":
            raise RuntimeError("a secret")
        if question == b"wait":
            assert self.go_on.wait(LONG)
        if question == b"later":
            threading.Thread(target=self._later, args=(question, reply)).start()
        else:
            reply(bytes(MUCH) if question == b"much" else question * 2)

    def _later(self, question: bytes, reply: Callable[[bytes], None]) -> None:
        assert self.go_on.wait(LONG)
        reply(question * 2)


def into() -> tuple[queue.SimpleQueue[End], Asked]:
    """Where an end comes, and what is told of it."""
    ends: queue.SimpleQueue[End] = queue.SimpleQueue()
    return ends, lambda *end: ends.put(end)


async def turns() -> None:
    """Some turns of the event loop: what was ready, and what that makes ready, has run."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(way: Way, question: bytes) -> End:
    """Ask and wait."""
    ends, reply = into()
    assert way.ask(question, time.monotonic() + LONG, reply)
    return ends.get(timeout=LONG)
