"""A request on its way through the engine: its call and bytes, its deadline, and the callback for its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from recinfer.serving.engine.memory_budget import UNCOUNTED, Ticket

__all__ = ["CallName", "Reply", "Request"]

CallName = Literal["Lookup", "Predict"]

Reply = Callable[["bytes | Exception"], None]
"""Takes a serialized answer or an error of ours; on any thread."""


class Request:
    """What every protocol makes of a call, for :meth:`recinfer.serving.engine.dispatcher.Dispatcher.dispatch`.

    Args:
        call: the method.
        data: a serialized recinfer.v1 LookupRequest or PredictRequest, whatever came over the wire.
        deadline: ``time.monotonic()`` after which nobody waits.
        reply: is given the answer, once; not when the request was dropped before.
        waits: called once, when the request has to wait for a thread, so that its protocol may watch whether its caller
            disconnects meanwhile; on any thread.
        ticket: what the call holds of the memory budget.
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
        """Give the answer; only the first one counts."""
        reply, self._reply = self._reply, None
        self.waits = None  # it may lead back to this request, and what it holds would wait for the garbage collector
        if reply is not None:
            reply(answer)

    def drop(self) -> None:
        """Nobody waits for the answer any more."""
        self._reply = self.waits = None
