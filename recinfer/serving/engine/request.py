"""A request on its way through the engine: its call and bytes, its deadline, and the callback for its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from recinfer.serving.engine.memory_budget import UNCOUNTED, Ticket
from recinfer.serving.wire.tracing import Fields, no_trace

if TYPE_CHECKING:
    from recinfer.serving.engine.registry import ServedModel

__all__ = ["AnswerCall", "CallName", "Reply", "Request", "served_of_task", "trace_of_task"]

served_of_task: ContextVar[ServedModel | None] = ContextVar("served_of_task", default=None)
"""The version that the call of this task got, for counts and the log; None: the call names nothing served. The handler of a
call clears it, since the calls of one HTTP connection share a task."""

trace_of_task: ContextVar[Fields] = ContextVar("trace_of_task", default=no_trace)
"""The trace of the call of this task, for shard servers."""

CallName = Literal["Lookup", "Predict"]

AnswerCall = Callable[[CallName, bytes], Awaitable[bytes]]
"""Answers a serialized request on the event loop; raises RecinferErrors."""

Reply = Callable[["bytes | Exception"], None]
"""Takes a serialized answer or an error; called on any thread."""


class Request:
    """The form to which every protocol converts a call, for :meth:`recinfer.serving.engine.dispatcher.Dispatcher.dispatch`.

    Args:
        call: the method.
        data: a serialized recinfer.v1 LookupRequest or PredictRequest, whatever the protocol.
        deadline: ``time.monotonic()`` after which the caller no longer waits.
        reply: called once with the answer; not called if the request was dropped before.
        waits: called on any thread, at most once, when the request has to wait for a thread, so that its protocol may watch
            for a disconnection of the client.
        ticket: the bytes of the memory budget that the call holds.
        trace: returns the trace of the call, which a ranker sends on to its shard servers.

    Attributes:
        served: the version that answers, once it is known; None too for a request that names nothing served.
    """

    __slots__ = ("_reply", "call", "data", "deadline", "served", "ticket", "trace", "waits")

    def __init__(
        self,
        call: CallName,
        data: bytes,
        deadline: float,
        reply: Reply,
        waits: Callable[[], None] | None = None,
        ticket: Ticket = UNCOUNTED,
        trace: Fields = no_trace,
    ) -> None:
        self.call = call
        self.data = data
        self.deadline = deadline
        self.waits = waits
        self.ticket = ticket
        self.trace = trace
        self.served: ServedModel | None = None
        self._reply: Reply | None = reply

    def chose(self, model: ServedModel) -> None:
        """Note the version that answers."""
        self.served = model

    def reply(self, answer: bytes | Exception) -> None:
        """Send the answer; only the first call counts."""
        reply, self._reply = self._reply, None
        self.waits = None  # ``waits`` may refer to this request: a cycle would hold memory until a garbage collection
        if reply is not None:
            reply(answer)

    def drop(self) -> None:
        """Drop the reply: the client no longer waits for it."""
        self._reply = self.waits = None
