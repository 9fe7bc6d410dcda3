"""Streams on grpcio's binding of gRPC's core that carry one question after another, each with its answer.

A call of its own costs a question more than the question does: headers and status, a filter stack, a timer, four events at
the server. A stream that is there already costs a message each way, and one event at each end, since a batch of operations
says "send this, and take what comes next". So nothing is sent on before it was answered, and nothing waits in a stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from recinfer.serving.core_call import SERVER_PARTS, Each, Owner, binding
from recinfer.serving.core_channel import Asked, CoreChannel

__all__ = ["AnswerStream", "AskStream"]

_log = logging.getLogger("recinfer.serving.server")


class AnswerStream:
    """The server's end. All of it happens on the thread that takes events.

    Args:
        server: whose it is.
        call: gRPC's.
        path: of its method, for the log.
        each: answers a message.
    """

    __slots__ = ("_call", "_each", "_path", "_server")

    def __init__(self, server: Owner, call: Any, path: str, each: Each) -> None:
        self._server, self._call, self._path, self._each = server, call, path, each

    def begin(self) -> None:
        """Say that it is there, and take the first question."""
        self._call.start_server_batch((_core.ReceiveCloseOnServerOperation(0),), self._closed)
        self._call.start_server_batch((_core.SendInitialMetadataOperation((), 0),), _nothing)
        self._call.start_server_batch((_core.ReceiveMessageOperation(0),), self._received)

    def _received(self, event: Any) -> None:
        question = event.batch_operations[-1].message() if event.success else None
        if question is None:  # who asked has no more questions, or is gone
            self._end(_core.StatusCode.ok)
            return
        try:
            answer = self._each(question)
        except Exception:
            _log.exception("%s failed", self._path)
            self._end(_core.StatusCode.unknown)
            return
        operations = (_core.SendMessageOperation(answer, 0), _core.ReceiveMessageOperation(0))
        self._call.start_server_batch(operations, self._received)

    def _end(self, code: Any) -> None:
        call, self._call = self._call, None
        call.start_server_batch((_core.SendStatusFromServerOperation((), code, b"", 0),), _nothing)

    def _closed(self, event: Any) -> None:
        self._server.open.discard(self)


class AskStream:
    """The asker's end. Any thread may use it.

    Args:
        channel: it is a call of.
        path: "/package.Service/Method".
        metadata: of the call.

    Attributes:
        since: ``time.monotonic()`` when it was opened.
        is_open: the server is there and takes questions.
        is_over: it has ended, with the status named ``code``.
    """

    def __init__(self, channel: CoreChannel, path: bytes, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._reply: Asked | None = None
        self._until = 0.0
        self._asked = False  # what was asked last is not answered yet, though maybe nobody waits for it
        self._closes = False
        self.since = time.monotonic()
        self.is_open = self.is_over = False
        self.code = ""
        head = (_core.SendInitialMetadataOperation(metadata, 0), _core.ReceiveInitialMetadataOperation(0))
        end = (_core.ReceiveStatusOnClientOperation(0),)
        self._call = channel.open(path, ((head, self._opened), (end, self._ended)))
        if self._call is None:
            self.is_over, self.code = True, "CANCELLED"

    def ask(self, question: bytes, until: float, reply: Asked) -> bool:
        """False: it can't be asked now, and ``reply`` is not told anything.

        Args:
            until: ``time.monotonic()`` after which nobody waits, see :meth:`expire`.
        """
        with self._lock:
            if not self.is_open or self._asked:
                return False
            self._asked, self._reply, self._until = True, reply, until
        operations = (_core.SendMessageOperation(question, 0), _core.ReceiveMessageOperation(0))
        if self._channel.go_on(self._call, operations, self._answered):
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

    def close(self) -> bool:
        """Let it end, unless something is asked; whether it will."""
        with self._lock:
            if self._asked:
                return False
            closes, self._closes, self.is_open = self._closes, True, False
        if not (closes or self.is_over):
            self._channel.go_on(self._call, (_core.SendCloseFromClientOperation(0),), _nothing)
        return True

    def _taken(self) -> Asked | None:
        with self._lock:
            reply, self._reply = self._reply, None
            return reply

    # -- on the channel's thread

    def _opened(self, event: Any) -> None:
        with self._lock:
            self.is_open = bool(event.success) and not (self.is_over or self._closes)

    def _answered(self, event: Any) -> None:
        message = event.batch_operations[-1].message() if event.success else None
        if message is None:
            self.is_open = False
            return  # its end is told too
        with self._lock:
            reply, self._reply = self._reply, None
            self._asked = False
        if reply is not None:
            reply(message, "OK", "")

    def _ended(self, event: Any) -> None:
        status = event.batch_operations[-1]
        self.code = CoreChannel.code_of(status)
        self.is_open, self.is_over = False, True
        reply = self._taken()
        if reply is not None:  # to who asked, an end in good order is none either
            reply(None, "UNAVAILABLE" if self.code == "OK" else self.code, status.details() or "the stream has ended")


def _nothing(event: Any) -> None:
    """Nobody waits for it."""


_core = binding(SERVER_PARTS)
