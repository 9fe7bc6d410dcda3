"""Trailing metadata of a status: whether a recinfer server sent it, and when to retry (gRPC's pushback header, RetryInfo)."""

from __future__ import annotations

from collections.abc import Sequence

from recinfer.errors import OverloadedError, UnavailableError
from recinfer.serving.wire.arrays import bytes_field, varint

__all__ = ["is_from_server", "trailing_of"]

_TYPE = b"type.googleapis.com/google.rpc.RetryInfo"
_RESOURCE_EXHAUSTED = 8
# UNAVAILABLE comes from gRPC where no server answers, and from a ranker whose shard servers do not. The ranker adds this
# pair, so that a client does not tell its user to start the server that has just answered.
_SERVER_MARK = ("recinfer-said", "1")


def is_from_server(trailing: Sequence[tuple[str, str | bytes]] | None) -> bool:
    """Whether a recinfer server ended the call, rather than gRPC because no server answered."""
    return any(tuple(pair) == _SERVER_MARK for pair in trailing or ())


def trailing_of(error: BaseException, message: str) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata for ``error``: empty unless the error means "unavailable" or "overloaded"."""
    if not isinstance(error, OverloadedError):
        return (_SERVER_MARK,) if isinstance(error, UnavailableError) else ()
    # google.rpc.Status{code, message, details[Any{type_url, value: RetryInfo{retry_delay: Duration}}]}, written by hand:
    # the package that holds those messages is not worth a dependency.
    micros = int(error.retry_after * 1e6)
    duration = _integer(1, micros // 1_000_000) + _integer(2, micros % 1_000_000 * 1000)
    detail = b"".join([*bytes_field(1, _TYPE), *bytes_field(2, *bytes_field(1, duration))])
    status = b"".join(
        [_integer(1, _RESOURCE_EXHAUSTED), *bytes_field(2, message.encode()[:500]), *bytes_field(3, detail)]
    )
    return (
        ("grpc-retry-pushback-ms", str(max(1, micros // 1000))),
        ("grpc-status-details-bin", status),
    )


def _integer(number: int, value: int) -> bytes:
    """A varint field."""
    return varint(number << 3) + varint(value)
