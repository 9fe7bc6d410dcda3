"""One call of the gRPC server (grpc_core), from its message to its end: its bytes of the memory budget, its timeouts, its status
and the context that its handler gets."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from recinfer.errors import DeadlineError, InputError, OverloadedError, RecinferError
from recinfer.serving.engine.dispatcher import Dispatcher
from recinfer.serving.engine.memory_budget import MemoryBudget, Ticket
from recinfer.serving.engine.request import CallName, Request
from recinfer.serving.server.grpc_binding import cygrpc
from recinfer.serving.server.telemetry.observe import REQUEST_ID, Observer
from recinfer.serving.wire.status import status_of, trailing_of
from recinfer.serving.wire.tracing import no_trace

__all__ = [
    "CANCELLED",
    "FAILED",
    "Bounds",
    "CallTicket",
    "CoreCall",
    "Dispatch",
    "Ending",
    "Method",
    "Owner",
    "dispatched",
    "ending_of",
    "logged_ending",
]

_log = logging.getLogger("recinfer.serving.server")
_LINGERS_BYTES, _LINGER_S = 16 << 10, 0.1
_SLOW_LOOKS = 3  # looks after which an incomplete message counts as ``slow_bytes``
_SENT_S = 30.0
"""Seconds after which a call ends whose client has not read the whole answer, also if the client reads slowly: gRPC's core
takes a whole message and reports only when all of it is sent, so the progress is not visible here. An answer of 64 MiB
needs a link of 18 Mbit/s."""

_RECEIVING, _RUNNING, _SENDING = range(3)

Dispatch = Callable[[bytes, float, "CoreCall"], None]
"""Takes a message, the ``time.monotonic()`` of its deadline and the call, on gRPC's thread; answers or ends the call at once or
later, on any thread."""


@dataclass(frozen=True)
class Ending:
    """The status of a call that ends without an answer.

    Attributes:
        code: name of its ``grpc.StatusCode``.
        message: text for the client.
        trailing: trailing metadata.
    """

    code: str
    message: str
    trailing: tuple[tuple[str, str | bytes], ...] = ()


def ending_of(error: Exception) -> Ending:
    """The status of a call that failed with ``error``."""
    status = status_of(error)
    return Ending(status.code, status.message, trailing_of(error, status.message))


def logged_ending(call: str, data: bytes, error: Exception) -> Ending:
    """:func:`ending_of`; an error of the server itself goes to the log."""
    ending = ending_of(error)
    if ending.code == "INTERNAL":
        _log.error("%s failed on a request of %d bytes", call, len(data), exc_info=error)
    return ending


CANCELLED = Ending("CANCELLED", "")
FAILED = Ending("UNKNOWN", "the server failed; its log has the details")
"""The status of a call whose error was not turned into a code."""
_NO_MESSAGE = Ending("UNIMPLEMENTED", "the method takes exactly one message, and there was none")


@dataclass(frozen=True)
class Bounds:
    """The limits of a method's calls.

    Attributes:
        budget: the memory budget that counts their messages and answers.
        most_bytes: largest size of a message.
        slow_bytes: bytes that a slow message counts as, since the part that has arrived is not visible.
        receive_s: seconds after which a call with an incomplete message is ended.
    """

    budget: MemoryBudget
    most_bytes: int
    slow_bytes: int
    receive_s: float


class CallTicket(Ticket):
    """The ticket of one gRPC call, from the wait for its first message on. gRPC's thread calls :meth:`look`.

    Args:
        bounds: the limits of the call's method.
    """

    __slots__ = ("_bounds", "_changes", "_looks", "_seen", "_since", "_stage")

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds.budget)
        self._bounds = bounds
        self._stage = _RECEIVING
        self._changes = self._seen = 0  # number of stage changes, now and at the last look
        self._since, self._looks = 0.0, 0  # time of the first look since the last change, and number of looks

    def receives(self) -> None:
        """Note that the call waits for a message."""
        self._enter(_RECEIVING)

    def received(self, num_bytes: int) -> None:
        """Count a message that has arrived; raises InputError if it is too large, OverloadedError if it does not fit."""
        self._enter(_RUNNING)
        if num_bytes > self._bounds.most_bytes:
            raise InputError(f"request: got {num_bytes} bytes, expected at most {self._bounds.most_bytes}")
        self.resize(num_bytes)

    def sends(self) -> None:
        """Note that an answer is being sent."""
        self._enter(_SENDING)

    def runs(self) -> None:
        """Note that one of many answers is sent, and more may follow."""
        self._enter(_RUNNING)

    def _enter(self, stage: int) -> None:
        self._stage = stage
        self._changes += 1

    def look(self, now: float) -> RecinferError | None:
        """The reason to end the call at ``now`` (``time.monotonic()``); None: the call goes on. Called at intervals."""
        if self._changes != self._seen or not self._looks:
            self._seen, self._since, self._looks = self._changes, now, 1
            return None
        self._looks += 1
        spent, bounds = now - self._since, self._bounds
        if self._stage == _SENDING and spent > _SENT_S:
            return DeadlineError(f"the answer was not taken for {_SENT_S:g} s")
        if self._stage != _RECEIVING:
            return None
        if spent > bounds.receive_s:
            return DeadlineError(f"request: not complete after {bounds.receive_s:g} s")
        # Counted in looks: a process that was stopped has not read the messages that arrived meanwhile.
        if self._looks >= _SLOW_LOOKS and self.held < bounds.slow_bytes:
            try:
                self.resize(bounds.slow_bytes)
            except OverloadedError as error:
                reason = f"a request that arrives slowly counts as {bounds.slow_bytes} bytes"
                return OverloadedError(f"{reason}: {error}", retry_after=error.retry_after)
        return None


class Owner(Protocol):
    """The part of its server that a call uses.

    Attributes:
        loop: the event loop on which handlers run.
        tasks: tasks of the calls that handlers answer.
        open: calls that gRPC has not closed yet; changed on gRPC's thread alone.
        is_stopping: whether the server takes no more calls.
    """

    loop: asyncio.AbstractEventLoop
    tasks: set[asyncio.Task[None]]
    open: set[CoreCall]

    @property
    def is_stopping(self) -> bool: ...

    def refused(self, path: str, code: str, metadata: Sequence[tuple[str, Any]]) -> None:
        """Count a call that was ended because of the memory that it holds; called on gRPC's thread."""


class Method:
    """Answers the calls of one path: ``dispatch`` takes their messages as they arrive, or else ``handler`` does.

    Attributes:
        num_open: number of its calls that gRPC has not closed yet; changed on gRPC's thread alone.
    """

    __slots__ = ("bounds", "dispatch", "handler", "num_open", "path", "read", "streams_in", "streams_out", "write")

    def __init__(self, path: str, handler: Any, dispatch: Dispatch | None, bounds: Bounds) -> None:
        self.path = path
        self.handler = handler
        self.dispatch = dispatch
        self.bounds = bounds
        self.streams_in = self.streams_out = False
        self.num_open = 0
        self.read: Any = bytes
        self.write: Any = bytes
        if handler is not None:
            self.streams_in = handler.request_streaming
            self.streams_out = handler.response_streaming
            self.read = handler.request_deserializer or bytes
            self.write = handler.response_serializer or bytes


class CoreCall:
    """One call, and its handler's context: the part of grpc.aio.ServicerContext that recinfer's handlers use.

    A call begins on gRPC's thread. Any thread may answer or end a dispatched call. A call with a handler belongs to the event
    loop, apart from its events. gRPC's own call object is released as soon as the call is over, since a server cannot end
    before.

    Attributes:
        ticket: the bytes of the memory budget that the call holds until it is over; None for an unknown method.
    """

    __slots__ = (
        "_call",
        "_deadline",
        "_end",
        "_gone",
        "_listens",
        "_metadata",
        "_method",
        "_opened",
        "_request_id",
        "_sending",
        "_server",
        "_task",
        "ticket",
    )

    def __init__(
        self,
        server: Owner,
        call: Any,
        metadata: Sequence[tuple[str, Any]],
        deadline: float,
        method: Method | None,
        request_id: str,
    ) -> None:
        self._server = server
        self._call = call
        self._metadata = metadata
        self._deadline = deadline
        self._method: Any = method
        self._request_id = (REQUEST_ID, request_id)
        self.ticket: Any = None
        if method is not None:
            self.ticket = CallTicket(method.bounds)
            method.num_open += 1
        self._task: asyncio.Task[None] | None = None
        self._opened = self._listens = False
        self._end = threading.Lock()  # guards the end of the call, and the decision to listen
        self._gone: Callable[[], None] | None = None  # called on a cancellation, instead of the task's
        self._sending: Any = None  # gRPC's call while its answer is being sent

    # -- on gRPC's thread

    def receive(self) -> None:
        """Ask gRPC for the call's one message."""
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._received)

    def _received(self, event: Any) -> None:
        data = event.batch_operations[0].message()
        if data is None:  # the caller has disconnected, or sends nothing
            self.end(_NO_MESSAGE)
            return
        try:
            self.ticket.received(len(data))
        except RecinferError as error:
            self._refuse(error)
            return
        if self._method.dispatch is None:
            self.run_handler(data)
            return
        try:
            self._method.dispatch(data, self._deadline, self)
        except Exception:
            _log.exception("%s failed", self._method.path)
            self.end(FAILED)

    def _refuse(self, error: RecinferError) -> None:
        ending = ending_of(error)
        self._server.refused(self._method.path, ending.code, self._metadata)
        self.end(ending)

    def look(self, now: float) -> None:
        """End a call that holds memory without progress. Called at intervals, with ``time.monotonic()``."""
        if self.ticket is None or (error := self.ticket.look(now)) is None:
            return
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel(cygrpc.StatusCode.unavailable, str(error))
        elif self._call is not None:
            self._refuse(error)

    def run_handler(self, data: bytes | None) -> None:
        """Run the handler as a task of the loop, which is cancelled when the client cancels or disconnects.

        ``data``: the call's one message; None: the handler reads a stream of messages.
        """
        self._listens = True
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._closed)
        self._server.loop.call_soon_threadsafe(self._begin, data)

    def _closed(self, event: Any) -> None:
        self._finished(event)
        gone, self._gone = self._gone or self._cancel_task_soon, None
        if event.batch_operations[0].cancelled():
            gone()

    def _cancel_task_soon(self) -> None:
        self._server.loop.call_soon_threadsafe(self._cancel_task)

    # -- on any thread

    def peer(self) -> str:
        """The client's address as gRPC reports it; empty when the call is over."""
        call = self._call
        return "" if call is None else _text(call.peer())

    def certificate_subject(self) -> str:
        """The subject of the client's certificate, else its common name; empty without a certificate."""
        call = self._call
        properties = {} if call is None else cygrpc.auth_context(call)
        found = {_text(name): values for name, values in properties.items()}
        for name in ("x509_subject", "x509_common_name"):
            if values := found.get(name):
                return _text(values[0])
        return ""

    def listen(self, gone: Callable[[], None]) -> None:
        """Have ``gone`` called, on gRPC's thread, if the client cancels or disconnects before the call is ended."""
        with self._end:
            call = self._call
            if call is None or self._listens:
                return
            self._gone, self._listens = gone, True
            call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._closed)

    def answer(self, message: bytes) -> None:
        """End the call with its one answer."""
        self._finish(message)

    def end(self, ending: Ending) -> None:
        """End the call without an answer."""
        code = _CODES.get(ending.code, cygrpc.StatusCode.unknown)
        self._finish(None, code, ending.message.encode(), ending.trailing)

    def _finish(
        self, message: bytes | None, code: Any = None, details: bytes = b"", trailing: Sequence[tuple[str, Any]] = ()
    ) -> None:
        with self._end:  # only the first of several threads ends the call
            call, self._call = self._call, None
        if call is None:
            return
        self._sending = call
        if self.ticket is not None:
            self.ticket.sends()
        if message is not None and len(message) > _LINGERS_BYTES and self._server.is_stopping:
            self._send_and_linger(call, message)
            return
        trailing = (*trailing, self._request_id)
        operations = [cygrpc.SendStatusFromServerOperation(trailing, _OK if code is None else code, details, 0)]
        if not self._opened:
            operations.append(cygrpc.SendInitialMetadataOperation((), 0))
        if message is not None:
            operations.append(cygrpc.SendMessageOperation(message, 0))
        if self._listens:
            call.start_server_batch(tuple(operations), _ignore_event)
            return
        operations.append(cygrpc.ReceiveCloseOnServerOperation(0))  # gRPC requires this operation
        call.start_server_batch(tuple(operations), self._finished)

    def _send_and_linger(self, call: Any, message: bytes) -> None:
        """Send the answer, and the end of the call a moment later.

        A stopping server closes a connection when its last call ends. Bytes of the answer that are still in this host's buffers
        are then lost as soon as the client sends anything, even a window update.
        """
        if not self._listens:
            call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._finished)
        operations = [cygrpc.SendMessageOperation(message, 0)]
        if not self._opened:
            operations.append(cygrpc.SendInitialMetadataOperation((), 0))
        loop, deadline, trailing = self._server.loop, self._deadline, (self._request_id,)

        def end() -> None:
            call.start_server_batch((cygrpc.SendStatusFromServerOperation(trailing, _OK, b"", 0),), _ignore_event)

        def sent(event: Any) -> None:
            left = (deadline - time.monotonic()) / 2  # the end must come before the deadline
            loop.call_soon_threadsafe(loop.call_later, min(_LINGER_S, max(left, 0.0)), end)

        call.start_server_batch(tuple(operations), sent)

    def _finished(self, event: Any) -> None:
        self._server.open.discard(self)
        self._sending = None
        if self.ticket is not None:
            self.ticket.release()
            self._method.num_open -= 1

    # -- on the loop

    def _begin(self, data: bytes | None) -> None:
        server = self._server
        if self._call is None:
            return
        self._task = server.loop.create_task(self._run(data))
        server.tasks.add(self._task)
        self._task.add_done_callback(server.tasks.discard)

    def _cancel_task(self) -> None:
        """Cancel the task of a call whose client has disconnected."""
        self._call = None
        if self._task is not None:
            self._task.cancel()

    async def _run(self, data: bytes | None) -> None:
        method = self._method
        try:
            request = self._messages() if data is None else self._read(data)
            if not method.streams_out:
                behaviour = method.handler.stream_unary if method.streams_in else method.handler.unary_unary
                self._finish(method.write(await behaviour(request, self)))
                return
            behaviour = method.handler.stream_stream if method.streams_in else method.handler.unary_stream
            answers = behaviour(request, self)
            if hasattr(answers, "__aiter__"):
                async for answer in answers:
                    await self.write(answer)
            else:
                await answers
            self._finish(None)
        except grpc.aio.AbortError:  # the call is ended
            pass
        except asyncio.CancelledError:
            self.end(CANCELLED)
        except InputError as error:
            self.end(Ending("INVALID_ARGUMENT", str(error)))
        except Exception:
            _log.exception("%s failed", method.path)
            self.end(FAILED)

    async def _messages(self) -> AsyncIterator[Any]:
        while True:
            self.ticket.receives()
            event = await self._step(cygrpc.ReceiveMessageOperation(0))
            data = event.batch_operations[0].message()
            if data is None:
                return
            self.ticket.received(len(data))
            yield self._read(data)

    def _read(self, data: bytes) -> Any:
        try:
            return self._method.read(data)
        except DecodeError:
            raise InputError(f"request: {len(data)} bytes are not the message that {self._method.path} takes") from None

    async def _step(self, *operations: Any) -> Any:
        """Have gRPC do ``operations``; returns the event of their completion."""
        if self._call is None:
            raise asyncio.CancelledError
        loop = self._server.loop
        done: asyncio.Future[Any] = loop.create_future()
        self._call.start_server_batch(operations, lambda event: loop.call_soon_threadsafe(_set, done, event))
        return await done

    # -- the context of a handler: see grpc.aio.ServicerContext

    async def write(self, message: Any) -> None:
        """Send one of many answers, and wait until gRPC has sent the answer. The same timeout ends the call of a client that
        does not read as for a single answer.
        """
        operations = [cygrpc.SendMessageOperation(self._method.write(message), 0)]
        if not self._opened:
            self._opened = True
            operations.append(cygrpc.SendInitialMetadataOperation((), 0))
        self._sending = self._call
        self.ticket.sends()
        event = await self._step(*operations)
        self._sending = None
        self.ticket.runs()
        if not event.success:
            raise asyncio.CancelledError

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the call with an error; raises AbortError."""
        self.end(Ending(code.name, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None without a deadline."""
        return None if self._deadline == math.inf else max(self._deadline - time.monotonic(), 0.0)

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        """The call's metadata."""
        return self._metadata


def dispatched(call: CallName, dispatcher: Dispatcher, observer: Observer) -> Dispatch:
    """The Dispatch of the method ``call``: dispatches each message on gRPC's thread; the reply ends the call."""

    def dispatch(data: bytes, until: float, core: CoreCall) -> None:
        start = time.perf_counter()
        trace = observer.begin(call, core.invocation_metadata)

        def answered(code: str) -> None:
            spent, served = time.perf_counter() - start, request.served
            metadata, size = core.invocation_metadata, len(data)
            observer.answered(call, code, spent, headers=metadata, num_bytes=size, served=served, trace=trace)

        def reply(answer: bytes | Exception) -> None:
            if not isinstance(answer, Exception):
                try:
                    core.ticket.resize(len(answer))  # frees the message
                except RecinferError as error:
                    answer = error
            if isinstance(answer, Exception):
                ending = logged_ending(call, data, answer)
                answered(ending.code)
                core.end(ending)
            else:
                answered("OK")
                core.answer(answer)

        def gone() -> None:
            dispatcher.scheduler.forget(request)
            answered("CANCELLED")

        request = Request(call, data, until, reply, lambda: core.listen(gone), core.ticket, trace or no_trace)
        dispatcher.dispatch(request)

    return dispatch


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _ignore_event(event: Any) -> None:
    """Completion callback without work."""


_CODES = {code.name: getattr(cygrpc.StatusCode, code.name.lower()) for code in grpc.StatusCode}
_OK = cygrpc.StatusCode.ok


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
