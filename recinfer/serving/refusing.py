"""Refuses calls as gRPC hands them over: before their message is read, and without the tasks that a call has in grpc.aio.

A call that is refused in its handler costs about what one costs that is answered: two tasks and four events, each of which
wakes the event loop. At three times what a server can take that is most of what it does. So calls that would find
the queue full are answered between gRPC's hand and grpc.aio's.

This reaches into what grpcio keeps to itself, which is known here in two forms: the later one (seen in 1.85) asks gRPC for
calls of each registered method by itself, the earlier one (seen in 1.81) for calls of any. Where it is neither, calls are
refused in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from recinfer.errors import OverloadedError
from recinfer.serving.observe import Observer
from recinfer.serving.retry import retry_info
from recinfer.serving.status import status_of

__all__ = ["Door", "Queue", "aio_server", "knows_grpcio"]

_log = logging.getLogger("recinfer.serving.server")
_HEADER = "authorization"
# What cygrpc._handle_rpc takes, in order, where it is known to ask the handlers for the call's method first of all.
_HANDLE_RPC = ("generic_handlers", "interceptors", "rpc_state", "loop", "concurrency_exceeded")


class Queue(Protocol):
    """What calls would wait in."""

    def has_room(self, deadline: float) -> bool:
        """Whether a request that is not waited for after ``deadline`` (``time.monotonic()``) would be taken."""

    def refusal(self, deadline: float) -> OverloadedError:
        """What one is told for whom there is no room; counts it."""


class Door:
    """Which calls are refused early.

    Args:
        queue: what they would wait in.
        methods: full method path ("/package.Service/Method") to the name it is counted under; others always pass.
        allows: whether a call with this ``authorization`` header may know; the others pass, to be told why not.
        observer: told of each refusal.
    """

    def __init__(
        self,
        queue: Queue,
        methods: Mapping[str, str],
        allows: Callable[[str | None], bool],
        observer: Observer,
    ) -> None:
        self.queue, self._methods, self._allows, self._observer = queue, methods, allows, observer

    @property
    def paths(self) -> tuple[str, ...]:
        """The methods whose calls may be refused."""
        return tuple(self._methods)

    def refuse(
        self, method: str, metadata: Sequence[tuple[str, Any]], deadline: float
    ) -> tuple[bytes, tuple[tuple[str, str | bytes], ...]] | None:
        """Message and trailing metadata for a call that there is no room for; None when it passes all the same."""
        call = self._methods.get(method)
        if call is None or not self._allows(next((value for key, value in metadata if key == _HEADER), None)):
            return None
        error = self.queue.refusal(deadline)
        status = status_of(error)
        self._observer.answered(call, status.code, 0.0, headers=metadata)
        return status.message.encode(), retry_info(error, status.message)


def knows_grpcio() -> bool:
    """Whether the installed grpcio is one that this module can reach into."""
    return _make is not None


def aio_server(door: Door, *, interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """``grpc.aio.server`` whose calls have to pass ``door`` first, where grpcio is known."""
    if _make is not None:
        return _make(door, interceptors, options)
    _log.info("grpcio %s is not known well enough to refuse calls early; they are refused later", grpc.__version__)
    return grpc.aio.server(interceptors=interceptors, options=options)


def _maker() -> Callable[[Door, Sequence[Any], Sequence[tuple[str, Any]]], grpc.aio.Server] | None:
    try:
        from grpc._cython import cygrpc
        from grpc.aio import _server as grpc_server

        by_method = hasattr(cygrpc.AioServer, "_request_registered_call")
        if by_method:
            if cygrpc.AioServer._request_registered_call.__code__.co_varnames[:2] != ("self", "method"):
                return None
            _ = cygrpc.AioServer.add_registered_method_handlers
        elif cygrpc._handle_rpc.__code__.co_varnames[: len(_HANDLE_RPC)] != _HANDLE_RPC:
            return None
        exhausted = cygrpc.StatusCode.resource_exhausted
        execute, context_of, close = cygrpc.execute_batch, cygrpc._ServicerContext, cygrpc.ReceiveCloseOnServerOperation
        send_metadata, send_status = cygrpc.SendInitialMetadataOperation, cygrpc.SendStatusFromServerOperation
        handle, augment, base = cygrpc._handle_rpc, grpc_server._augment_channel_arguments, cygrpc.AioServer
        _ = base._request_call
    except (ImportError, AttributeError):
        return None

    class AioServer(base):  # type: ignore[misc, valid-type]
        """grpc.aio's inner server, which asks the door before it hands a call on."""

        door: Door
        refusals: set[asyncio.Task[None]]

        async def _request_call(self) -> Any:
            while True:
                state = await super()._request_call()
                if by_method or not self._refuses(state, None):  # calls of registered methods come the other way
                    return state

        async def _request_registered_call(self, method: bytes) -> Any:
            while True:
                state = await super()._request_registered_call(method)
                if not self._refuses(state, method.decode()):
                    return state

        def _refuses(self, state: Any, method: str | None) -> bool:
            """Whether the call has been ended here. ``method``: None where that is still to be found out."""
            loop = asyncio.get_running_loop()
            context = context_of(state, None, None, loop)
            left = context.time_remaining()
            deadline = math.inf if left is None else time.monotonic() + left
            if self.door.queue.has_room(deadline):
                return False
            refused = self.door.refuse(method or _method_of(state, loop), context.invocation_metadata(), deadline)
            if refused is None:
                return False
            message, trailing = refused
            ending = (send_metadata((), 0), send_status(trailing, exhausted, message, 0), close(0))
            task = loop.create_task(execute(state, ending, loop))
            self.refusals.add(task)
            task.add_done_callback(self._ended)
            return True

        def _ended(self, task: asyncio.Task[None]) -> None:
            self.refusals.discard(task)
            if not task.cancelled():
                task.exception()  # who asked is gone: nothing to do

    def _method_of(state: Any, loop: asyncio.AbstractEventLoop) -> str:
        peek = _Peek()
        asked = handle([peek], (), state, loop, False)
        try:
            asked.send(None)
        except _Seen:
            pass
        finally:
            asked.close()
        return peek.method

    class Server(grpc_server.Server):
        """grpc.aio's server around it."""

        def __init__(self, door: Door, interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> None:
            self._loop = cygrpc.get_working_loop()
            self._server = AioServer(self._loop, None, (), tuple(interceptors), augment(tuple(options), None), None)
            self._server.door, self._server.refusals = door, set()

        def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
            super().add_generic_rpc_handlers(generic_rpc_handlers)
            if by_method:  # a call of any method is handed over without its name
                known = {path: _handler(generic_rpc_handlers, path) for path in self._server.door.paths}
                self._server.add_registered_method_handlers({path: known[path] for path in known if known[path]})

    return Server


def _handler(handlers: Sequence[grpc.GenericRpcHandler], path: str) -> grpc.RpcMethodHandler | None:
    """What handles the calls of one method."""
    details = _Details(path)
    return next((found for handler in handlers if (found := handler.service(details)) is not None), None)


@dataclass(frozen=True)
class _Details:
    """As grpc.HandlerCallDetails, of a call without metadata."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class _Seen(Exception):
    """The peek is over."""


class _Peek:
    """A generic handler that remembers what was called and ends the look for a handler there."""

    method = ""

    def service(self, details: grpc.HandlerCallDetails) -> None:
        """See grpc.GenericRpcHandler."""
        self.method = details.method
        raise _Seen


_make = _maker()
