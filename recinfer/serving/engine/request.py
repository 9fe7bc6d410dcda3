"""A request on its way through the engine: its call and bytes, its deadline, and the callback for its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from recinfer.serving.engine.memory_budget import UNCOUNTED, Ticket

__all__ = ["AnswerCall", "CallName", "Reply", "Request"]

CallName = Literal["Lookup", "Predict"]

AnswerCall = Callable[[CallName, bytes], Awaitable[bytes]]
"""Answers a serialized request on the event loop; raises errors of ours."""

Reply = Callable[["bytes | Exception"], None]
"""Takes a serialized answer or an error of ours; on any thread."""


class Request:
    """The form to which every protocol converts a call, for :meth:`recinfer.serving.engine.dispatcher.Dispatcher.dispatch`.

    Args:
        call: the method.
        data: a serialized recinfer.v1 LookupRequest or PredictRequest, whatever came over the wire.
        deadline: ``time.monotonic()`` after which the caller no longer waits.
        reply: called once with the answer; not called if the request was dropped before.
        waits: called once, when the request has to wait for a thread, so that its protocol may watch whether its caller
            disconnects meanwhile; on any thread.
        ticket: the bytes of the memory budget that the call holds.
    """

    __slots__ = ("_reply", "call", "data", "deadline", "ticket", "waits")

    def __init__(
        self,
        call: CallName,
        data: bytes,
        deadline: float,
        reply: Reply,
        waits: Callable[[], None] | None = None,
        ticket: Ticket = UNCOUNTED,
    ) -> None:
        self.call, self.data, self.deadline, self.waits, self.ticket = call, data, deadline, waits, ticket
        self._reply: Reply | None = reply

    def reply(self, answer: bytes | Exception) -> None:
        """Send the answer; only the first call counts."""
        reply, self._reply = self._reply, None
        self.waits = None  # it may lead back to this request, and what it holds would wait for the garbage collector
        if reply is not None:
            reply(answer)

    def drop(self) -> None:
        """Give up the answer: the caller no longer waits for it."""
        self._reply = self.waits = None
