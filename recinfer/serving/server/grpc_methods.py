"""The handling of a call by every gRPC server of recinfer: bytes in, bytes out, errors as statuses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from recinfer.errors import UnavailableError
from recinfer.serving.engine.memory_budget import ticket_of_task
from recinfer.serving.engine.request import served_of_task, trace_of_task
from recinfer.serving.server.grpc_call import CoreCall, logged_ending
from recinfer.serving.server.grpc_core import CoreServer
from recinfer.serving.server.health import EndingHealth
from recinfer.serving.server.security import Security
from recinfer.serving.server.telemetry.observe import Observer
from recinfer.serving.server.tuning import most_connections
from recinfer.serving.wire import codec
from recinfer.serving.wire.address import grpc_address
from recinfer.serving.wire.admin_verbs import VERBS
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.tracing import no_trace

__all__ = [
    "Answer",
    "add_reflection",
    "add_standard_services",
    "bind",
    "connection_options",
    "core_call",
    "deadline",
    "generic_handler",
    "handler",
    "signed",
]

_HANDSHAKE_MS, _KEEPALIVE_MS = 10_000, 60_000
_AGE_MS, _AGE_GRACE_MS = 1_800_000, 600_000
_IDENTITY = 1 << grpc.Compression.NoCompression
_MAX_PENDING = 1 << 15
MOST_METADATA_BYTES = 32 << 10
"""The bytes of a call's metadata have to be fewer than this; HTTP has the same limit for each header."""

# time.monotonic() of the deadline of the call that this task answers; every such call has a task of its own.
deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)

# The call that this task answers.
core_call: ContextVar[CoreCall | None] = ContextVar("core_call", default=None)

Answer = Callable[[bytes], Awaitable[bytes]]

_Handler = Callable[[bytes, CoreCall], Awaitable[bytes]]


def connection_options(
    limits: Limits | None = None, idle_s: float | None = None, *, share_port: bool = False
) -> list[tuple[str, int]]:
    """The options of every gRPC server of recinfer.

    Args:
        limits: bounds on messages and calls; None: the default ones.
        idle_s: seconds after which a connection without a call is closed; None: never.
        share_port: other processes may listen on the same port; without, a second server on a taken port fails.
    """
    limits = limits or Limits()
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # bounded by max_response_bytes, before anything is computed
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.max_concurrent_streams", limits.max_concurrent),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        *([] if idle_s is None else [("grpc.max_connection_idle_ms", max(1, int(idle_s * 1e3)))]),
        # Timeouts for clients that are slow in the handshake, or that fail silently.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _HANDSHAKE_MS),
        # Clients may ping as often as they like, also without calls: rankers do every two seconds, others to keep a connection
        # through a load balancer.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Both limits are equal: between gRPC's defaults of 8 and 16 KiB, the length of long cookies and tokens, calls
        # are refused at random.
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        # The largest age of a connection ends calls that are opened and never sent. Such calls take no place from others, since
        # only the queue bounds the calls of all connections together. Other clients move to a new connection unnoticed.
        ("grpc.max_connection_age_ms", _AGE_MS),
        ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS),
        # The unpacked size of a compressed message is not known in advance. gRPC's core refuses such a call before any handler
        # gets it, as UNIMPLEMENTED, "Compression algorithm 'gzip' is disabled.", a text that cannot be changed.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY),
        # Beyond the first limit some calls, and beyond the second all, would be dropped as a bare CANCELLED without a count.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    ]


def bind(server: CoreServer, security: Security, host: str, port: int) -> int:
    """Bind ``server`` to an address (``host``: see recinfer.serving.wire.address); returns the port.

    Raises:
        UnavailableError, ConfigError: the address cannot be bound; a file of the credentials is bad.
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
    """The handler of ``service``'s methods, which parse bytes themselves: a parse error gets a message of recinfer."""
    methods = {
        call: grpc.unary_unary_rpc_method_handler(handler(call, answer, observer))  # type: ignore[arg-type]
        for call, answer in calls.items()
    }
    return grpc.method_handlers_generic_handler(service, methods)


def handler(call: str, answer: Answer, observer: Observer) -> _Handler:
    """The handler of the method ``call``: ``answer`` with deadline, status and counting."""

    async def handle(data: bytes, context: CoreCall) -> bytes:
        start = time.perf_counter()
        trace = observer.begin(call, context.invocation_metadata)
        trace_of_task.set(trace or no_trace)

        def answered(code: str) -> None:
            """Count an answer before it is sent, so that a client with an answer finds it counted."""
            spent, served = time.perf_counter() - start, served_of_task.get()
            metadata, size = context.invocation_metadata, len(data)
            observer.answered(call, code, spent, headers=metadata, num_bytes=size, served=served, trace=trace)

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
            ending = logged_ending(call, data, error)
            answered(ending.code)
            try:
                await context.abort(grpc.StatusCode[ending.code], ending.message, ending.trailing)
            except grpc.aio.AbortError:
                raise
            except Exception:
                # gRPC cannot send a status to a disconnected client, and would log that as an error of the server.
                raise asyncio.CancelledError from None
            raise  # not reached: abort raises
        answered("OK")
        return response

    return handle


def add_standard_services(
    server: CoreServer,
    services: Sequence[str],
    files: Sequence[FileDescriptor],
    is_ready: Callable[[], bool] = lambda: True,
) -> EndingHealth:
    """Add reflection and health to ``server``; returns the health service, which begins with NOT_SERVING.

    Args:
        services: services that reflection lists, besides health and reflection; ``files`` describe them.
        is_ready: see EndingHealth.
    """
    add_reflection(server, (*services, health.SERVICE_NAME), (*files, health_pb2.DESCRIPTOR))
    servicer = EndingHealth(is_ready)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def signed(calls: Mapping[str, Answer], security: Security) -> dict[str, Answer]:
    """``calls`` by method; a call that makes a change gets its request with ``change.who`` filled in."""
    return {name: _signed(name, call, security) for name, call in calls.items()}


def _signed(name: str, call: Answer, security: Security) -> Answer:
    verb = VERBS[name]
    if not verb.changes:
        return call

    async def answer(data: bytes) -> bytes:
        request: Any = codec.parse(verb.request, data)
        made_by = core_call.get()
        request.change.who = "unknown" if made_by is None else security.client_identity(made_by)
        return await call(request.SerializeToString())

    return answer


_METHOD = "ServerReflectionInfo"
_ALPHA, _V1 = ".v1alpha.", ".v1."


def add_reflection(server: CoreServer, services: Sequence[str], files: Sequence[FileDescriptor]) -> None:
    """Add both versions of the reflection service to ``server``.

    Args:
        services: services that reflection lists, besides its own.
        files: describe ``services``.
    """
    alpha = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    pool = DescriptorPool()  # a new pool: recinfer's files and the Open Inference Protocol's are in different pools
    for file in files:
        pool.AddSerializedFile(file.serialized_pb)
    pool.Add(alpha)
    pool.Add(_as_v1(alpha))
    own = (reflection.SERVICE_NAME, reflection.SERVICE_NAME.replace(_ALPHA, _V1))
    shown = reflection.aio.ReflectionServicer((*services, *own), pool=pool)
    method = grpc.stream_stream_rpc_method_handler(
        shown.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(service, {_METHOD: method}) for service in own]
    server.add_generic_rpc_handlers(handlers)


def _as_v1(alpha: FileDescriptorProto) -> FileDescriptorProto:
    """The file of v1, which grpcio-reflection lacks: v1alpha's under another package name."""
    file = FileDescriptorProto()
    file.CopyFrom(alpha)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = file.package.removesuffix("alpha")
    file.ClearField("options")
    for field in (field for message in file.message_type for field in message.field):
        if field.type_name:
            field.type_name = field.type_name.replace(_ALPHA, _V1)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(_ALPHA, _V1)
        method.output_type = method.output_type.replace(_ALPHA, _V1)
    return file
