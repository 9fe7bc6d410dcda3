"""The handling of a call by every gRPC server of recinfer: bytes in, bytes out, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving.engine.dispatcher import Dispatcher
from recinfer.serving.engine.memory_budget import ticket_of_task
from recinfer.serving.engine.request import CallName, Request
from recinfer.serving.server.ending import Ending, ending_of
from recinfer.serving.server.grpc_call import CoreCall, Dispatch
from recinfer.serving.server.grpc_core import CoreServer
from recinfer.serving.server.health import EndingHealth
from recinfer.serving.server.security import Security
from recinfer.serving.server.telemetry.observe import Observer
from recinfer.serving.wire.address import grpc_address

__all__ = [
    "Answer",
    "add_standard_services",
    "bind",
    "connection_options",
    "core_call",
    "deadline",
    "dispatched",
    "generic_handler",
    "handler",
]

_log = logging.getLogger("recinfer.serving.server")
_HANDSHAKE_MS, _KEEPALIVE_MS = 10_000, 60_000
_AGE_MS, _AGE_GRACE_MS = 1_800_000, 600_000
_IDENTITY = 1 << grpc.Compression.NoCompression
_MAX_PENDING = 1 << 15
MOST_METADATA_BYTES = 32 << 10
"""Of all of a call's metadata, which has to be smaller; HTTP has the same limit for each header."""

# time.monotonic() after which the caller of this task's call does not wait any more; every call is a task of its own.
deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)

# The call that this task answers.
core_call: ContextVar[CoreCall | None] = ContextVar("core_call", default=None)

Answer = Callable[[bytes], Awaitable[bytes]]

_Handler = Callable[[bytes, CoreCall], Awaitable[bytes]]


def connection_options() -> list[tuple[str, int]]:
    """How a server of ours treats connections."""
    return [
        # Clients that are slow in the handshake, or that fail silently.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _HANDSHAKE_MS),
        # Clients may ping as often as they like, also without calls: rankers do every two seconds, others to keep a connection
        # through a load balancer.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # One limit, where gRPC's two refuse calls between 8 and 16 KiB at random: long cookies and tokens are as long.
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        # Calls that are opened and never sent. They take no place of others', since there is no bound on all
        # connections' calls together but the queue's; this ends them. Other callers move on unnoticed.
        ("grpc.max_connection_age_ms", _AGE_MS),
        ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS),
        # What one unpacks to is not known before it is there. gRPC's core refuses such a call before it gives it to anybody,
        # as UNIMPLEMENTED, "Compression algorithm 'gzip' is disabled.", and lets nobody change that text.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY),
        # Beyond the first some calls, and beyond the second all, would be dropped as a bare CANCELLED, which is not counted.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    ]


def bind(server: CoreServer, security: Security, host: str, port: int) -> int:
    """The port that ``server`` listens on from its start, at what ``host`` means (see recinfer.serving.wire.address).

    Raises:
        UnavailableError, ConfigError: it cannot listen there; a file of the credentials is bad.
    """
    credentials = security.credentials()
    target, taken = grpc_address(host, port)
    try:
        return server.add_insecure_port(target) if credentials is None else server.add_secure_port(target, credentials)
    except RuntimeError as error:  # taken since the address was checked
        raise UnavailableError(f"cannot listen on {target}: {error}") from None
    finally:
        if taken is not None:
            taken.close()


def generic_handler(service: str, calls: Mapping[str, Answer], observer: Observer) -> grpc.GenericRpcHandler:
    """The methods of ``service``. Bytes in, bytes out: parsing is theirs, so that its errors get a code and our message."""
    methods = {
        call: grpc.unary_unary_rpc_method_handler(handler(call, answer, observer))  # type: ignore[arg-type]
        for call, answer in calls.items()
    }
    return grpc.method_handlers_generic_handler(service, methods)


def handler(call: str, answer: Answer, observer: Observer) -> _Handler:
    """What gRPC calls for the method ``call``: deadline, status and counting around ``answer``."""

    async def handle(data: bytes, context: CoreCall) -> bytes:
        start = time.perf_counter()

        def answered(code: str) -> None:
            """Counted before it is sent, so that a caller with an answer finds it counted."""
            spent = time.perf_counter() - start
            observer.answered(call, code, spent, headers=context.invocation_metadata, num_bytes=len(data))

        left = context.time_remaining()
        if left is not None:
            deadline.set(time.monotonic() + left)
        ticket_of_task.set(context.ticket)
        core_call.set(context)
        try:
            response = await answer(data)
            context.ticket.resize(len(response))
        except asyncio.CancelledError:
            answered("CANCELLED")
            raise
        except Exception as error:
            ending = _ending(call, data, error)
            answered(ending.code)
            try:
                await context.abort(grpc.StatusCode[ending.code], ending.message, ending.trailing)
            except grpc.aio.AbortError:
                raise
            except Exception:
                # gRPC cannot send it to a disconnected caller, and would log that as an error of the server.
                raise asyncio.CancelledError from None
            raise  # not reached: abort raises
        answered("OK")
        return response

    return handle


def dispatched(call: CallName, dispatcher: Dispatcher, observer: Observer) -> Dispatch:
    """What gRPC's thread does with a message of the method ``call``: it is dispatched there, and its reply ends the call."""

    def dispatch(data: bytes, until: float, core: CoreCall) -> None:
        start = time.perf_counter()

        def answered(code: str) -> None:
            spent = time.perf_counter() - start
            observer.answered(call, code, spent, headers=core.invocation_metadata, num_bytes=len(data))

        def reply(answer: bytes | Exception) -> None:
            if not isinstance(answer, Exception):
                try:
                    core.ticket.resize(len(answer))  # frees the message
                except RecinferError as error:
                    answer = error
            if isinstance(answer, Exception):
                ending = _ending(call, data, answer)
                answered(ending.code)
                core.end(ending)
            else:
                answered("OK")
                core.answer(answer)

        def gone() -> None:
            dispatcher.scheduler.forget(request)
            answered("CANCELLED")

        request = Request(call, data, until, reply, lambda: core.listen(gone), core.ticket)
        dispatcher.dispatch(request)

    return dispatch


def _ending(call: str, data: bytes, error: Exception) -> Ending:
    ending = ending_of(error)
    if ending.code == "INTERNAL":
        _log.error("%s failed on a request of %d bytes", call, len(data), exc_info=error)
    return ending


def add_standard_services(
    server: CoreServer,
    services: Sequence[str],
    files: Sequence[FileDescriptor],
    is_ready: Callable[[], bool] = lambda: True,
) -> EndingHealth:
    """Reflection and health, which is given back and says NOT_SERVING.

    Args:
        services: that reflection lists, besides health and itself; ``files`` describe them.
        is_ready: see EndingHealth.
    """
    pool = DescriptorPool()  # of its own: our files and the Open Inference Protocol's are in different ones
    for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    shown = reflection.aio.ReflectionServicer((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), pool=pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(shown, server)
    servicer = EndingHealth(is_ready)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer
