"""The one table from errors to gRPC and HTTP codes, and back on the client's side."""

from __future__ import annotations

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

__all__ = ["Status", "error_of", "status_of"]


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
