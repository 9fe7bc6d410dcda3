"""A way to a server that carries one question at a time: who asked is told, once, and nobody waits for ever."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

__all__ = ["Asked", "Way"]

Asked = Callable[["bytes | None", str, str], None]
"""Told of a question's end, on a thread of its way: the answer or None, the name of the ``grpc.StatusCode``, its details."""


class Way:
    """What ways have in common; any thread may use one. A subclass sends, and says what came.

    Attributes:
        lasts_s: seconds from ``since`` after which it should be replaced.
        since: ``time.monotonic()`` when it was opened.
        is_open: the server is there and takes questions; ``was_open``: it has been.
        is_over: it has ended, with the status named ``code``.
    """

    lasts_s = math.inf

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reply: Asked | None = None
        self._until = 0.0
        self._asked = False  # what was asked last is not answered yet, though maybe nobody waits for it
        self._closes = False
        self.since = time.monotonic()
        self.is_open = self.was_open = self.is_over = False
        self.code = ""

    @property
    def is_old(self) -> bool:
        """It should take no more questions, as it ends soon."""
        return time.monotonic() - self.since > self.lasts_s

    def ask(self, question: bytes, until: float, reply: Asked) -> bool:
        """False: it can't be asked now, and ``reply`` is not told anything.

        Args:
            until: ``time.monotonic()`` after which nobody waits, see :meth:`expire`.
        """
        with self._lock:
            if not self.is_open or self._asked:
                return False
            self._asked, self._reply, self._until = True, reply, until
        if self._send(question):
            return True
        self.is_open = False
        return self._taken() is None  # somebody else has told who asked

    def forget(self, reply: Asked) -> None:
        """Nobody waits any more for what ``reply`` was to be told."""
        with self._lock:
            if self._reply is reply:
                self._reply = None

    def expire(self, now: float) -> None:
        """Tell who has waited too long; ``now``: ``time.monotonic()``."""
        if self._reply is None or now < self._until:
            return
        with self._lock:
            reply = self._reply if now >= self._until else None
            if reply is not None:
                self._reply = None
        if reply is not None:
            reply(None, "DEADLINE_EXCEEDED", "no answer came in time")

    def close(self, *, at_once: bool = False) -> bool:
        """Let it end, unless something is asked; whether it will. ``at_once``: whatever is asked."""
        with self._lock:
            if self._asked and not at_once:
                return False
            closes, self._closes, self.is_open = self._closes, True, False
        if not (closes or self.is_over):
            self._end()
        return True

    # -- of subclasses

    def _send(self, question: bytes) -> bool:
        """Send; False: it has ended."""
        raise NotImplementedError

    def _end(self) -> None:
        """Say to the server that nothing more comes; :meth:`_ended` is called later."""
        raise NotImplementedError

    # -- for subclasses

    def _opened(self) -> None:
        with self._lock:
            self.is_open = self.was_open = not (self.is_over or self._closes)

    def _answered(self, message: bytes) -> bool:
        """What was asked is answered; False: nothing was."""
        with self._lock:
            reply, self._reply = self._reply, None
            asked, self._asked = self._asked, False
        if reply is not None:
            reply(message, "OK", "")
        return asked

    def _ended(self, code: str, details: str) -> None:
        self.code = code
        self.is_open, self.is_over = False, True
        reply = self._taken()
        if reply is not None:  # to who asked, an end in good order is none either
            reply(None, "UNAVAILABLE" if code == "OK" else code, details or "the connection has ended")

    def _taken(self) -> Asked | None:
        with self._lock:
            reply, self._reply = self._reply, None
            return reply
