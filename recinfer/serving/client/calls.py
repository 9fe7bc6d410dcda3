"""Channels and single calls: their security, and gRPC's errors as recinfer's errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc

from recinfer.env import grpc_proxy
from recinfer.errors import DeadlineError, InputError, OverloadedError, RecinferError, UnavailableError
from recinfer.serving.client.retry import LONGEST_S, is_full, pushback
from recinfer.serving.wire.status import error_of, is_from_server
from recinfer.serving.wire.tls import File, credentials_of

__all__ = ["channel_to", "check_target", "invoke", "security_of", "translated"]

# Texts of gRPC's own refusals of a message or of metadata, which have the status code of a full server.
_TOO_LARGE = ("larger than max", "metadata size exceeds")
_MESSAGE_SIZES = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")
# The forms of gRPC's addresses; without a port, gRPC would take 443.
_TARGET = re.compile(
    r"(dns:(//[^/]*/)?)?(\[[0-9a-fA-F:.]+(%\w+)?\]|[^:/\[\]]+):[0-9]{1,5}|(unix|unix-abstract|vsock|ipv4|ipv6|xds):.+"
)


def check_target(target: str) -> None:
    """Raise InputError for anything but a host with a port, or an address with one of gRPC's schemes."""
    if not isinstance(target, str) or _TARGET.fullmatch(target) is None:
        raise InputError(
            f"target: got {target!r:.80}, expected HOST:PORT of the server's gRPC port, such as '127.0.0.1:8500' "
            "(TLS is set by tls_ca)"
        )


def security_of(
    ca: File | None, cert: File | None, key: File | None, name: str
) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
    """A channel's credentials, None without TLS, and its options. Raises InputError."""
    credentials = credentials_of(ca, cert, key)
    # An answer's size is bounded by the server's limits. A restarted server is found within a second, as by rankers.
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # While a call is open, a ping after five seconds finds a silently dead connection. A ping times out after three
        # seconds; without this, gRPC would hold the next ping back for a minute.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.http2.ping_timeout_ms", 3_000),
    ]
    if not name:
        return credentials, options
    if credentials is None:
        raise InputError(f"TLS: got the name {name!r} without tls_ca, expected the server's authority too")
    return credentials, [*options, ("grpc.ssl_target_name_override", name)]


def channel_to(
    target: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, Any]]
) -> grpc.Channel:
    """A blocking channel; ``credentials`` and ``options`` come from :func:`security_of`."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def invoke(
    method: Callable[..., bytes],
    request: bytes,
    target: str,
    seconds: float,
    *,
    start_with: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Call ``method`` of a channel to ``target`` and turn gRPC's exception into recinfer's error."""
    try:
        return method(request, timeout=min(seconds, LONGEST_S), metadata=metadata)
    except grpc.RpcError as error:
        raise translated(error, target, seconds, start_with) from None
    except ValueError as error:  # gRPC raises it for a closed channel
        raise UnavailableError(f"{target}: {error}; make a new client") from None


def translated(error: Any, target: str, seconds: float, start_with: str) -> RecinferError:
    """The RecinferError for an exception of gRPC."""
    code, details = error.code(), error.details() or ""
    if is_from_server(error.trailing_metadata()):  # the target answered: a server that it calls is missing
        return error_of(code.name, f"{target}: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        proxy = grpc_proxy(target)
        through = (
            f" through the proxy of {proxy}, which the environment sets (no_proxy excludes hosts)" if proxy else ""
        )
        if "http1.x server" in details:
            return UnavailableError(
                f"no answer from {target}{through}: it speaks HTTP/1.1, as a server's --http-port does; give the server's "
                "gRPC port (--port)"
            )
        if "Socket closed" in details:
            return UnavailableError(
                f"no answer from {target}{through}: the connection was closed. Either the server ended, or it is a server "
                "with TLS that was called without TLS or a client certificate: give tls_ca, tls_cert (--tls-ca, --tls-cert)"
            )
        return UnavailableError(
            f"no answer from {target}{through} ({details}); is the server running? Start one with: {start_with}"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{target} did not answer within {seconds:g} s; send less or wait longer")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RecinferError(
            f"{target} does not know this call ({details}); is it a server of another kind? Start one with: {start_with}"
        )
    if is_full(error):
        return OverloadedError(details, retry_after=pushback(error) or 0.0)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(text in details for text in _TOO_LARGE):
        if sizes := _MESSAGE_SIZES.search(details):
            details = (
                f"request: got {sizes[1]} bytes, expected at most {sizes[2]} (the server's --max-message-mib); send fewer "
                "samples per request"
            )
        return InputError(details)  # not OverloadedError: no later try helps
    if code is grpc.StatusCode.UNAUTHENTICATED:
        details += "; give token_file or token (--token-file, RECINFER_TOKEN)"
    return error_of(code.name, details)
