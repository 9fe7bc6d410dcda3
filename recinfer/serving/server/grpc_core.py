"""A gRPC server on grpcio's binding of gRPC's core: one thread takes all events, and answers calls at once where possible.

grpc.aio passes each of a call's events from gRPC's thread to the event loop's, where each event wakes a task: most of the
cost of a small request. In this server, the thread that waits for gRPC's events does a call's steps itself, and only a call
whose answer has to be waited for becomes a task of the event loop. Handlers are written as for grpc.aio, and get the part of
its context that they use.

Admission ends calls without the token, and calls that the queue cannot take, before their message is read.

recinfer.serving.server.grpc_binding has the parts of gRPC of which the server is made.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from recinfer.errors import OverloadedError
from recinfer.serving.engine.memory_budget import MemoryBudget
from recinfer.serving.engine.scheduler import QueueBudget, Scheduler
from recinfer.serving.server.grpc_binding import cygrpc
from recinfer.serving.server.grpc_call import CANCELLED, FAILED, Bounds, CoreCall, Dispatch, Ending, Method, ending_of
from recinfer.serving.server.security import NO_TOKEN, Security
from recinfer.serving.server.telemetry.observe import Observer, RequestIds
from recinfer.serving.wire.limits import Limits

__all__ = ["Admission", "Admit", "CoreServer", "names_of"]

_log = logging.getLogger("recinfer.serving.server")
_REQUESTED = 8  # calls that gRPC may deliver before the thread takes the next event
_REQUESTED_LATE = 1024  # calls that gRPC may deliver when the server stops
_PATHS = 1024  # cached paths; clients may send any number of unknown paths
_NEVER_S = 1e17  # gRPC gives a call without a deadline a later time
_TICK_S = 60.0  # between two polls of gRPC without events
_AT_ONCE = 0.0  # a time of the past, so that the poll does not wait
_LOOK_S, _IDLE_LOOKS = 0.1, 3  # while the last calls end
_CANCELLED_S = 3.0  # for gRPC to end cancelled calls
_STILL_S = 0.05  # between two checks of the open calls
_MOST_LATE = 8  # events that are taken before a check of the open calls that is due
_RECEIVE_S = 30.0  # for a message to arrive whole
# Health and reflection are small, and health needs no token: two calls at a time may be slow to send their message.
_OPEN_TO_ALL = ("/grpc.health.", "/grpc.reflection.")
_OPEN_BYTES, _OPEN_RECEIVE_S, _OPEN_BUDGET = 64 << 10, 3.0, 3
# Calls with many answers may never end, and health and reflection need no token. Every ranker holds one Watch on each of its
# shard servers, a prober at most one.
_MOST_STREAMS = 1024

Refused = Callable[[str, str, Sequence[tuple[str, Any]]], None]
"""Called for each call that was ended because of the memory that it holds: method path, code, metadata. On gRPC's thread."""

Admit = Callable[[str, float, Sequence[tuple[str, Any]]], "Ending | None"]
"""(method path, ``time.monotonic()`` of the deadline, metadata) -> the status that ends a call as it arrives, before its
message is read; None: the call goes on. Called on gRPC's thread."""

_NO_METHOD = Ending("UNIMPLEMENTED", "Method not found!")


class CoreServer:
    """The interface of grpc.aio.Server, for handlers of one message in and one or many out, and of many in and out.

    Each call has an id in its metadata, the caller's or a new one, which the trailing metadata of its answer returns.

    Args:
        options: options of the server's channels.
        admit: decides about every call as it arrives.
        refused: called for each call that is ended for the memory it holds.
        dispatch: method path -> receiver of the serialized messages, for methods with one message in and out.
        turns: the scheduler to which ``dispatch`` submits; its ``run_ready`` is called after a submission when gRPC has no more
            events.
        budget: memory budget of messages and answers; None: a budget of the default size.
        most_bytes: largest size of a message, the same as in ``options``.

    Tasks run on the event loop that :meth:`start` runs on.

    Attributes:
        thread_id: native id of the thread that takes events; None before :meth:`start`.
        tasks, open: see recinfer.serving.server.grpc_call.Owner.
    """

    def __init__(
        self,
        options: Sequence[tuple[str, Any]],
        admit: Admit = lambda path, deadline, metadata: None,
        refused: Refused = lambda path, code, metadata: None,
        dispatch: Mapping[str, Dispatch] | None = None,
        turns: Scheduler | None = None,
        budget: MemoryBudget | None = None,
        most_bytes: int = Limits.max_message_bytes,
    ) -> None:
        self._admit = admit
        self._dispatch = dict(dispatch or {})
        self._turns = turns
        budget = budget or MemoryBudget(Limits.memory_budget_bytes)
        self._bounds = Bounds(budget, most_bytes, most_bytes, _RECEIVE_S)
        open_budget = MemoryBudget(_OPEN_BUDGET * most_bytes)
        self._bounds_of_open = Bounds(open_budget, min(most_bytes, _OPEN_BYTES), most_bytes, _OPEN_RECEIVE_S)
        self.refused = refused
        self._ids = RequestIds()
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: dict[bytes, Method | None] = {}
        self._server = cygrpc.Server(tuple(options), False)
        self._events = cygrpc.CompletionQueue()
        self._server.register_completion_queue(self._events)
        self._requested = 0  # calls that were requested of gRPC and are not delivered yet
        self._event_since: float | None = None
        self._requested_late = self._given_late = 0  # counts during a stop: changed on the loop, and on gRPC's thread
        self._ends = threading.Event()
        self._all_ended = False
        self._over: asyncio.Event | None = None
        self.thread_id: int | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.open: set[CoreCall] = set()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """See grpc.aio.Server."""
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """See grpc.aio.Server. Generated code passes the same handlers to :meth:`add_generic_rpc_handlers`."""

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
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._server.start()
        for _ in range(_REQUESTED):
            self._request_call()
        thread = threading.Thread(target=self._take_events, name="recinfer-grpc", daemon=True)
        thread.start()
        self.thread_id = thread.native_id

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, wait up to ``grace`` seconds for running ones, then cancel the others."""
        if self._over is None or self._ends.is_set():
            return
        self._ends.set()
        # Calls that have arrived and that the server has not taken would end as a bare CANCELLED.
        for _ in range(_REQUESTED_LATE):
            self._server.request_call(self._events, self._events, self._called_late)
            self._requested_late += 1
        self._server.shutdown(self._events, self._shut)
        if grace:
            await self._wait_for_calls(self._over, grace)
        if not self._over.is_set():
            self._server.cancel_all_calls()
            for call in tuple(self.open):
                call.end(CANCELLED)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _CANCELLED_S)
        if self._over.is_set():
            self._server.destroy()  # not before, as gRPC forbids it while calls are being cancelled
        else:
            _log.warning("some calls do not end; the server leaves them behind")
        for task in tuple(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(tuple(self.tasks), timeout=_CANCELLED_S)

    async def _wait_for_calls(self, over: asyncio.Event, seconds: float) -> None:
        """Wait until all calls of this server have ended. gRPC sometimes keeps a call that arrived just as the server began to
        stop, does not deliver it, and waits for its end: this method does not wait for such a call.
        """
        until, idle = time.monotonic() + seconds, 0
        while idle < _IDLE_LOOKS and (left := until - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), min(left, _LOOK_S))
                return
            idle = 0 if self.open or self._has_requested else idle + 1

    @property
    def is_stopping(self) -> bool:
        """See recinfer.serving.server.grpc_call.Owner."""
        return self._ends.is_set()

    @property
    def event_s(self) -> float:
        """Seconds that gRPC's thread has spent on the current event, or on the end of a turn; 0.0 while it waits for an event.
        Any thread may read it."""
        since = self._event_since
        return 0.0 if since is None else time.monotonic() - since

    # -- on gRPC's thread --------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        timed_out, poll, turns = cygrpc.CompletionType.queue_timeout, self._events.poll, self._turns
        looked, late = time.monotonic(), 0
        while True:
            self._event_since = None
            has_new = turns is not None and turns.has_new
            is_due = (now := time.monotonic()) - looked >= _STILL_S
            event = poll(_AT_ONCE if has_new or is_due else time.time() + (_STILL_S if self.open else _TICK_S))
            self._event_since = time.monotonic()
            if is_due:  # events that have come are taken first, else their calls would look idle
                late += 1
                if event.completion_type == timed_out or late > _MOST_LATE:
                    looked, late = now, 0
                    self._look(now)
            if turns is not None and has_new and (event.completion_type == timed_out or turns.is_due):
                try:
                    turns.run_ready()
                except Exception:
                    _log.exception("the end of a turn failed")
            if event.completion_type == timed_out:
                continue
            ends = False
            try:
                ends = event.tag(event) is _END
            except Exception:
                _log.exception("a call's event was lost")
            # An event may hold the last reference to its call, which has to be released before another call is requested, and
            # before the server is destroyed.
            event = None
            if ends:
                break
        self.loop.call_soon_threadsafe(self._over.set)  # type: ignore[union-attr]

    def _look(self, now: float) -> None:
        for call in self.open:
            call.look(now)

    def _request_call(self) -> None:
        self._requested += 1
        try:
            self._server.request_call(self._events, self._events, self._called)
        except ValueError:  # the server has been stopped since
            self._requested -= 1

    def _called(self, event: Any) -> object:
        """Handle the event of a requested call: the call has arrived, or the server stops."""
        self._requested -= 1
        if not self._ends.is_set():
            self._request_call()
        return self._begin(event)

    def _called_late(self, event: Any) -> object:
        """Handle the event of a call that was requested during a stop, for calls that had arrived before."""
        self._given_late += 1
        return self._begin(event)

    def _begin(self, event: Any) -> object:
        if not event.success or not event.call_details.method:
            return self._end_if_over()
        details, metadata = event.call_details, event.invocation_metadata
        request_id, metadata = self._ids.in_metadata(metadata)
        deadline = math.inf
        if details.deadline < _NEVER_S:
            deadline = time.monotonic() + details.deadline - time.time()
        method = self._method(details.method, metadata)
        path = details.method.decode("utf-8", "replace") if method is None else method.path
        try:
            ending = self._admit(path, deadline, metadata)
        except Exception:
            _log.exception("%s could not be admitted", path)
            ending = FAILED
        if ending is None and method is not None and method.streams_out and method.num_open >= _MOST_STREAMS:
            ending = self._too_many_open(method, metadata)
        call = CoreCall(self, event.call, metadata, deadline, method, request_id)
        self.open.add(call)
        if ending is not None or method is None:
            call.end(ending or _NO_METHOD)
        elif method.streams_in:
            call.run_handler(None)
        else:
            call.receive()
        return None

    def _too_many_open(self, method: Method, metadata: Sequence[tuple[str, Any]]) -> Ending:
        name = method.path.rpartition("/")[2]
        why = f"{method.num_open} {name} calls are open on this server, as many as it holds; close some, or try again later"
        self.refused(method.path, "RESOURCE_EXHAUSTED", metadata)
        return Ending("RESOURCE_EXHAUSTED", why)

    def _method(self, path: bytes, metadata: Sequence[tuple[str, Any]]) -> Method | None:
        found = self._methods.get(path, _UNSEEN)
        if found is _UNSEEN:
            name = path.decode("utf-8", "replace")
            details: Any = SimpleNamespace(method=name, invocation_metadata=tuple(metadata))
            handler = next((h for each in self._handlers if (h := each.service(details)) is not None), None)
            bounds = self._bounds_of_open if name.startswith(_OPEN_TO_ALL) else self._bounds
            dispatch = self._dispatch.get(name)
            found = None if handler is dispatch is None else Method(name, handler, dispatch, bounds)
            if len(self._methods) < _PATHS:
                self._methods[path] = found
        return found  # type: ignore[return-value]

    def _shut(self, event: Any) -> object:
        """Handle the event of the shutdown: no call is running any more. Returns _END if no requested call is left."""
        self._all_ended = True
        return self._end_if_over()

    def _end_if_over(self) -> object:
        return _END if self._all_ended and not self._has_requested else None

    @property
    def _has_requested(self) -> bool:
        return self._requested > 0 or self._requested_late > self._given_late


_END, _UNSEEN = object(), object()


class Admission:
    """Ends calls that are not admitted as they arrive, before their message is read: under threefold overload, this is most of
    the server's work. Called on gRPC's thread.

    Args:
        security: decides which calls may pass.
        queue: the queue in which calls would wait; None: no call is refused for a full queue.
        methods: the methods whose calls are refused when the queue is full: full path ("/package.Service/Method") -> its name
            in the counts.
        observer: counts each refusal.
        names: the name in the counts of each method, from :func:`names_of`; other paths count as "other".
    """

    def __init__(
        self,
        security: Security,
        observer: Observer,
        queue: QueueBudget | None = None,
        methods: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.security = security
        self._needs_token = bool(security.tokens)  # a server never changes from tokens to none, or back
        self._observer = observer
        self._queue = queue
        self._methods = dict(methods or {})
        self._names = dict(names or {})
        self._last_refusal: tuple[OverloadedError | None, Ending] = (None, NO_TOKEN)

    def admit(self, path: str, deadline: float, metadata: Sequence[tuple[str, Any]]) -> Ending | None:
        """The status of a call that is not admitted; see :data:`Admit`."""
        call = self._methods.get(path)
        if self._needs_token and not self.security.admits(path, metadata):
            self.refused(path, NO_TOKEN.code, metadata)
            return NO_TOKEN
        if call is None or self._queue is None or (error := self._queue.refused(deadline)) is None:
            return None
        last_error, ending = self._last_refusal
        if error is not last_error:
            ending = ending_of(error)
            self._last_refusal = error, ending
        self._observer.answered(call, ending.code, None, headers=metadata)
        return ending

    def refused(self, path: str, code: str, metadata: Sequence[tuple[str, Any]]) -> None:
        """Count a call that was ended; see :data:`Refused`."""
        self._observer.answered(self._names.get(path, "other"), code, None, headers=metadata)


def names_of(*services: ServiceDescriptor) -> dict[str, str]:
    """The name of each method of ``services`` by its full path."""
    return {f"/{service.full_name}/{method.name}": method.name for service in services for method in service.methods}
