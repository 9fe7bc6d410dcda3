"""Streams on grpcio's binding of gRPC's core that carry one question after another, each with its answer.

A call of its own costs a question more than the question does: headers and status, a filter stack, a timer, four events at
the server. A stream that is there already costs a message each way, and one event at each end, since a batch of operations
says "send this, and take what comes next". So nothing is sent on before it was answered, and nothing waits in a stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from recinfer.serving.server.grpc_binding import cygrpc
from recinfer.serving.server.grpc_call import Each, Owner
from recinfer.serving.server.grpc_channel import CoreChannel
from recinfer.serving.server.serial_connection import Way

__all__ = ["AnswerStream", "AskStream"]

_log = logging.getLogger("recinfer.serving.server")
_IS_THERE = (("recinfer-asks", "each"),)
"""Initial metadata with which a server says that it takes questions."""


class AnswerStream:
    """The server's end. But for answers that come later, all of it happens on the thread that takes events.

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
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._closed)
        self._call.start_server_batch((cygrpc.SendInitialMetadataOperation(_IS_THERE, 0),), _nothing)
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._received)

    def _received(self, event: Any) -> None:
        question = event.batch_operations[-1].message() if event.success else None
        if question is None:  # who asked has no more questions, or is gone
            self._end(cygrpc.StatusCode.ok)
            return
        try:
            self._each(question, self._reply)
        except Exception:
            _log.exception("%s failed", self._path)
            self._end(cygrpc.StatusCode.unknown)

    def _reply(self, answer: bytes) -> None:
        operations = (cygrpc.SendMessageOperation(answer, 0), cygrpc.ReceiveMessageOperation(0))
        self._call.start_server_batch(operations, self._received)

    def _end(self, code: Any) -> None:
        call, self._call = self._call, None
        call.start_server_batch((cygrpc.SendStatusFromServerOperation((), code, b"", 0),), _nothing)

    def _closed(self, event: Any) -> None:
        self._server.open.discard(self)


class AskStream(Way):
    """The asker's end.

    Args:
        channel: it is a call of.
        path: "/package.Service/Method".
        metadata: of the call.
    """

    lasts_s = 300.0  # servers close connections of half an hour ten minutes later, and what is open on them

    def __init__(self, channel: CoreChannel, path: bytes, metadata: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._channel = channel
        head = (cygrpc.SendInitialMetadataOperation(metadata, 0), cygrpc.ReceiveInitialMetadataOperation(0))
        end = (cygrpc.ReceiveStatusOnClientOperation(0),)
        self._call = channel.open(path, ((head, self._begun), (end, self._status)))
        if self._call is None:
            self._ended("CANCELLED", "")

    def _send(self, question: bytes) -> bool:
        operations = (cygrpc.SendMessageOperation(question, 0), cygrpc.ReceiveMessageOperation(0))
        return self._channel.go_on(self._call, operations, self._received)

    def _end(self) -> None:
        self._channel.go_on(self._call, (cygrpc.SendCloseFromClientOperation(0),), _nothing)

    # -- on the channel's thread

    def _begun(self, event: Any) -> None:
        # Where nobody answers this method a status alone comes. This event is a success then too, and may come before it.
        found = event.batch_operations[-1].initial_metadata() if event.success else ()
        if any(pair in _IS_THERE for pair in found):
            self._opened()

    def _received(self, event: Any) -> None:
        message = event.batch_operations[-1].message() if event.success else None
        if message is None:
            self.is_open = False  # its end is told too
        else:
            self._answered(message)

    def _status(self, event: Any) -> None:
        status = event.batch_operations[-1]
        self._ended(CoreChannel.code_of(status), status.details() or "")


def _nothing(event: Any) -> None:
    """Nobody waits for it."""
