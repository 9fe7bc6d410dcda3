"""A gRPC server on grpcio's binding of gRPC's core, in place of grpc.aio: one thread takes all events, and answers at once what can be.

grpc.aio hands each of a call's events from gRPC's thread to the event loop's, where each wakes a task; for a small request
that is most of what it costs. Here the thread that waits for gRPC's events does a call's steps itself, and only a call whose
answer has to be waited for becomes a task of the event loop. Handlers are written as for grpc.aio, and get what they need
of its context, so a server can be either.

The binding is what grpcio's own synchronous server (``grpc/_server.py``) is made of: objects that have been the same for
years, but are not promised to stay. Where they are not as expected, :func:`knows_grpcio` says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

__all__ = ["Admit", "CoreServer", "Ending", "Fast", "knows_grpcio"]

_log = logging.getLogger("recinfer.serving.server")
_ASKED_FOR = 8  # calls that gRPC may hand over before the thread turns to it again
_PATHS = 1024  # that are remembered; callers may make up any number of them
_NEVER_S = 1e17
_TICK_S = 60.0
_CANCELLED_S = 3.0  # until calls that were cancelled are given back

Fast = Callable[[bytes, float, Callable[[], Any]], "bytes | Ending | None"]
"""Answers a message at once, on gRPC's thread: takes it, the ``time.monotonic()`` after which nobody waits, and what gives the
call's metadata. None: the call's handler has to answer."""

Admit = Callable[[str, float, Sequence[tuple[str, Any]]], "Ending | None"]
"""What a call is ended with as it arrives, before its message is read: takes method path, ``time.monotonic()`` after which
nobody waits, metadata. None: it goes on. Called on gRPC's thread."""


@dataclass(frozen=True)
class Ending:
    """How a call ends that is not answered.

    Attributes:
        code: name of its ``grpc.StatusCode``.
        message: for the caller.
        trailing: metadata.
    """

    code: str
    message: str
    trailing: tuple[tuple[str, str | bytes], ...] = ()


_NO_METHOD = Ending("UNIMPLEMENTED", "Method not found!")
_NO_MESSAGE = Ending("UNIMPLEMENTED", "the method takes exactly one message, and there was none")
_CANCELLED = Ending("CANCELLED", "")
_FAILED = Ending("UNKNOWN", "the server failed; its log has the details")


def knows_grpcio() -> bool:
    """Whether the installed grpcio has what this module is made of."""
    return _core is not None


class CoreServer:
    """As grpc.aio.Server, for handlers of one message in and one or many out, and of many in and out.

    Args:
        options: of the server's channels.
        admit: looks at every call as it arrives.
        fast: by method path; for methods with one message in and out, whose messages it gets as they came.

    Tasks run on the event loop that :meth:`start` runs on.
    """

    def __init__(
        self,
        options: Sequence[tuple[str, Any]],
        admit: Admit = lambda path, deadline, metadata: None,
        fast: Mapping[str, Fast] | None = None,
    ) -> None:
        self._core = _core
        self._options = tuple(options)
        self._admit, self._fast = admit, dict(fast or {})
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: dict[bytes, _Method | None] = {}
        self._server = _core.Server(self._options, False)
        self._events = _core.CompletionQueue()
        self._server.register_completion_queue(self._events)
        self._asked = 0  # how many times gRPC has been asked for a call and has not given one
        self._handed = self._begun = 0
        self._ends, self._all_ended = threading.Event(), False
        self._over: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """See grpc.aio.Server."""
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """See grpc.aio.Server. Generated code gives the same handlers to :meth:`add_generic_rpc_handlers`."""

    def add_insecure_port(self, address: str) -> int:
        """See grpc.aio.Server."""
        return self._bound(self._server.add_http2_port(address.encode()), address)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """See grpc.aio.Server."""
        return self._bound(self._server.add_http2_port(address.encode(), server_credentials._credentials), address)

    def _bound(self, port: int, address: str) -> int:
        if not port:
            raise RuntimeError(f"failed to bind to address {address}")
        return port

    async def start(self) -> None:
        """Accept calls; their tasks run on this event loop."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._server.start()
        for _ in range(_ASKED_FOR):
            self._ask()
        self._thread = threading.Thread(target=self._take_events, name="recinfer-grpc", daemon=True)
        self._thread.start()

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, let those that run end for up to ``grace`` seconds, cancel the others."""
        if self._over is None or self._ends.is_set():
            return
        self._ends.set()
        self._server.shutdown(self._events, self._shut)
        if grace:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), grace)
        if not self._over.is_set():
            self._server.cancel_all_calls()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _CANCELLED_S)
        if self._over.is_set():
            self._server.destroy()  # here, as it may not be while calls are being cancelled
        else:
            _log.warning("some calls do not end; the server leaves them behind")
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    @property
    def coming(self) -> int:
        """Calls that gRPC's thread has handed to the loop, whose handlers have not begun."""
        return self._handed - self._begun

    def _has_begun(self) -> None:
        self._begun += 1

    # -- on gRPC's thread --------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        timed_out, poll = _core.CompletionType.queue_timeout, self._events.poll
        while True:
            event = poll(time.time() + _TICK_S)
            if event.completion_type == timed_out:
                continue
            try:
                if event.tag(event) is _END:
                    break
            except Exception:
                _log.exception("a call's event was lost")
            # An event may hold the last reference to its call, which gRPC wants back before it is asked again.
            event = None
        self._loop.call_soon_threadsafe(self._over.set)  # type: ignore[union-attr]

    def _ask(self) -> None:
        self._asked += 1
        try:
            self._server.request_call(self._events, self._events, self._called)
        except ValueError:  # the server has been stopped since
            self._asked -= 1

    def _called(self, event: Any) -> object:
        """A call is there, or will not be, as the server stops."""
        self._asked -= 1
        if not event.success or not event.call_details.method:
            return self._end_if_over()
        if not self._ends.is_set():
            self._ask()
        details, metadata = event.call_details, event.invocation_metadata
        deadline = math.inf
        if details.deadline < _NEVER_S:
            deadline = time.monotonic() + details.deadline - time.time()
        method = self._method(details.method, metadata)
        call = _Call(self, event.call, metadata, deadline, method)
        path = details.method.decode("utf-8", "replace") if method is None else method.path
        try:
            ending = self._admit(path, deadline, metadata)
        except Exception:
            _log.exception("%s could not be admitted", path)
            ending = _FAILED
        if ending is not None or method is None:
            call.end(ending or _NO_METHOD)
        elif method.streams_in:
            call.hand_over(None)
        else:
            call.receive()
        return None

    def _method(self, path: bytes, metadata: Sequence[tuple[str, Any]]) -> _Method | None:
        found = self._methods.get(path, _UNSEEN)
        if found is _UNSEEN:
            name = path.decode("utf-8", "replace")
            details = _Details(name, tuple(metadata))
            handler = next((h for each in self._handlers if (h := each.service(details)) is not None), None)
            found = None if handler is None else _Method(name, handler, self._fast.get(name))
            if len(self._methods) < _PATHS:
                self._methods[path] = found
        return found  # type: ignore[return-value]

    def _shut(self, event: Any) -> object:
        """No call is under way any more, and none will come."""
        self._all_ended = True
        return self._end_if_over()

    def _end_if_over(self) -> object:
        return _END if self._all_ended and not self._asked else None


class _Method:
    """What answers the calls of one path."""

    __slots__ = ("fast", "handler", "path", "read", "streams_in", "streams_out", "write")

    def __init__(self, path: str, handler: Any, fast: Fast | None) -> None:
        self.path, self.handler, self.fast = path, handler, fast
        self.streams_in, self.streams_out = handler.request_streaming, handler.response_streaming
        self.read = handler.request_deserializer or bytes
        self.write = handler.response_serializer or bytes


@dataclass(frozen=True)
class _Details:
    """As grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: tuple[Any, ...] = ()


class _Call:
    """One call, and what its handler is told of it: the part of grpc.aio.ServicerContext that ours use.

    It begins on gRPC's thread. Once it is handed over it is the loop's, but for its events. gRPC's own call is let go as soon
    as it is over: a server does not end before.
    """

    __slots__ = ("_call", "_deadline", "_listens", "_metadata", "_method", "_opened", "_server", "_task")

    def __init__(
        self,
        server: CoreServer,
        call: Any,
        metadata: Sequence[tuple[str, Any]],
        deadline: float,
        method: _Method | None,
    ) -> None:
        self._server, self._call, self._metadata, self._deadline = server, call, metadata, deadline
        self._method: Any = method
        self._task: asyncio.Task[None] | None = None
        self._opened = self._listens = False

    # -- on gRPC's thread

    def receive(self) -> None:
        """Wait for its one message."""
        self._call.start_server_batch((_core.ReceiveMessageOperation(0),), self._received)

    def _received(self, event: Any) -> None:
        data = event.batch_operations[0].message()
        if data is None:  # the caller is gone, or has nothing to say
            self.end(_NO_MESSAGE)
            return
        if self._method.fast is not None:
            try:
                answer = self._method.fast(data, self._deadline, self.invocation_metadata)
            except Exception:
                _log.exception("%s failed", self._method.path)
                answer = _FAILED
            if answer is not None:
                self.end(answer) if isinstance(answer, Ending) else self._finish(answer)
                return
        self.hand_over(data)

    def hand_over(self, data: bytes | None) -> None:
        """The rest is a task of the loop, which is cancelled when the caller goes away."""
        self._listens = True
        self._call.start_server_batch((_core.ReceiveCloseOnServerOperation(0),), self._closed)
        self._server._handed += 1
        self._server._loop.call_soon_threadsafe(self._begin, data)

    def _closed(self, event: Any) -> None:
        if event.batch_operations[0].cancelled():
            self._server._loop.call_soon_threadsafe(self._leave)

    # -- wherever it is

    def end(self, ending: Ending) -> None:
        """End it without an answer."""
        code = _CODES.get(ending.code, _core.StatusCode.unknown)
        self._finish(None, code, ending.message.encode(), ending.trailing)

    def _finish(
        self, message: bytes | None, code: Any = None, details: bytes = b"", trailing: Sequence[tuple[str, Any]] = ()
    ) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        operations = [_core.SendStatusFromServerOperation(trailing, _OK if code is None else code, details, 0)]
        if not self._opened:
            operations.append(_core.SendInitialMetadataOperation((), 0))
        if message is not None:
            operations.append(_core.SendMessageOperation(message, 0))
        if not self._listens:  # gRPC wants somebody to
            operations.append(_core.ReceiveCloseOnServerOperation(0))
        call.start_server_batch(tuple(operations), _nothing)

    # -- on the loop

    def _begin(self, data: bytes | None) -> None:
        server = self._server
        if self._call is None:
            server._has_begun()
            return
        self._task = server._loop.create_task(self._run(data))
        server._loop.call_soon(server._has_begun)  # after the task's first step
        server._tasks.add(self._task)
        self._task.add_done_callback(server._tasks.discard)

    def _leave(self) -> None:
        """The caller is gone."""
        self._call = None
        if self._task is not None:
            self._task.cancel()

    async def _run(self, data: bytes | None) -> None:
        method = self._method
        try:
            request = self._messages() if data is None else method.read(data)
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
        except grpc.aio.AbortError:  # it is ended
            pass
        except asyncio.CancelledError:
            self.end(_CANCELLED)
        except Exception:
            _log.exception("%s failed", method.path)
            self.end(_FAILED)

    async def _messages(self) -> AsyncIterator[Any]:
        while True:
            event = await self._step(_core.ReceiveMessageOperation(0))
            data = event.batch_operations[0].message()
            if data is None:
                return
            yield self._method.read(data)

    async def _step(self, *operations: Any) -> Any:
        """What gRPC says when it has done them."""
        if self._call is None:
            raise asyncio.CancelledError
        loop = self._server._loop
        done: asyncio.Future[Any] = loop.create_future()
        self._call.start_server_batch(operations, lambda event: loop.call_soon_threadsafe(_set, done, event))
        return await done

    # -- what a handler may ask: see grpc.aio.ServicerContext

    async def write(self, message: Any) -> None:
        """Send one of many answers, and wait until gRPC has taken it."""
        operations = [_core.SendMessageOperation(self._method.write(message), 0)]
        if not self._opened:
            self._opened = True
            operations.append(_core.SendInitialMetadataOperation((), 0))
        if not (await self._step(*operations)).success:
            raise asyncio.CancelledError

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the call with an error; raises."""
        self.end(Ending(code.name, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError

    def time_remaining(self) -> float | None:
        """Seconds that the caller waits; None: as long as it takes."""
        return None if self._deadline == math.inf else max(self._deadline - time.monotonic(), 0.0)

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        """What came with the call."""
        return self._metadata


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _nothing(event: Any) -> None:
    """Of a call that is over."""


_END, _UNSEEN = object(), object()


def _binding() -> Any:
    try:
        from grpc._cython import cygrpc
    except ImportError:
        return None
    wanted = {
        "Server": (
            "register_completion_queue",
            "add_http2_port",
            "start",
            "request_call",
            "shutdown",
            "cancel_all_calls",
            "destroy",
        ),
        "CompletionQueue": ("poll",),
        "CompletionType": ("queue_timeout",),
        "StatusCode": ("ok", "unknown"),
        "ReceiveMessageOperation": ("message",),
        "ReceiveCloseOnServerOperation": ("cancelled",),
        "SendInitialMetadataOperation": (),
        "SendMessageOperation": (),
        "SendStatusFromServerOperation": (),
        "Call": ("start_server_batch", "peer"),
    }
    has_all = all(
        hasattr(cygrpc, kind) and all(hasattr(getattr(cygrpc, kind), name) for name in names)
        for kind, names in wanted.items()
    )
    return cygrpc if has_all else None


_core = _binding()
_CODES = (
    {} if _core is None else {code.name: getattr(_core.StatusCode, code.name.lower(), None) for code in grpc.StatusCode}
)
_OK = None if _core is None else _core.StatusCode.ok
