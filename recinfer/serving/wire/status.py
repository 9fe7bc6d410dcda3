"""The one table from errors to gRPC and HTTP codes, and back on the client's side; trailing metadata of a status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recinfer.errors import (
    ArchiveError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    InputError,
    NotFoundError,
    NotPreparedError,
    OverloadedError,
    RecinferError,
    UnavailableError,
)
from recinfer.excerpts import excerpt
from recinfer.serving.wire.arrays import bytes_field, varint

__all__ = ["Status", "error_of", "is_from_server", "status_of", "trailing_of"]


@dataclass(frozen=True)
class Status:
    """The form in which a client gets an error.

    Attributes:
        code: name of a ``grpc.StatusCode``, for example ``"INVALID_ARGUMENT"``.
        http: the HTTP code with the same meaning; TorchServe's gRPC form turns it back into ``code``.
        message: text for the caller; never a traceback or a path of the server.
    """

    code: str
    http: int
    message: str


# First match wins. ConfigError and similar errors mean that the server is broken, not that the request is wrong.
_TABLE: tuple[tuple[type[RecinferError], str, int], ...] = (
    (InputError, "INVALID_ARGUMENT", 400),
    (NotPreparedError, "FAILED_PRECONDITION", 412),
    (NotFoundError, "NOT_FOUND", 404),
    (OverloadedError, "RESOURCE_EXHAUSTED", 429),
    (DeadlineError, "DEADLINE_EXCEEDED", 504),
    (UnavailableError, "UNAVAILABLE", 503),
    (ConfigError, "INTERNAL", 500),
    (CheckpointError, "INTERNAL", 500),
    (ArchiveError, "INTERNAL", 500),
    (RecinferError, "INTERNAL", 500),
)
_MAX_MESSAGE = 1000
_INTERNAL = Status("INTERNAL", 500, "internal error; the server's log has the details")
_ERRORS: dict[str, type[RecinferError]] = {
    "OUT_OF_RANGE": InputError,
    "CANCELLED": UnavailableError,
    **{code: kind for kind, code, _ in _TABLE if code != "INTERNAL"},
}


def status_of(error: BaseException) -> Status:
    """The status that a client gets for ``error``; errors of the server itself become INTERNAL without their message."""
    for kind, code, http in _TABLE:
        if isinstance(error, kind):
            return _INTERNAL if code == "INTERNAL" else Status(code, http, excerpt(str(error), _MAX_MESSAGE))
    return _INTERNAL


def error_of(code: str, message: str) -> RecinferError:
    """The error to raise on a client's side for the status ``code`` (a ``grpc.StatusCode`` name)."""
    return _ERRORS.get(code, RecinferError)(message)


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
