"""How a call ends that is not answered: its gRPC code, message and trailing metadata."""

from __future__ import annotations

from dataclasses import dataclass

from recinfer.serving.wire.retry import trailing_of
from recinfer.serving.wire.status import status_of

__all__ = ["CANCELLED", "FAILED", "Ending", "ending_of"]


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


def ending_of(error: Exception) -> Ending:
    """How a call ends that failed with ``error``."""
    status = status_of(error)
    return Ending(status.code, status.message, trailing_of(error, status.message))


CANCELLED = Ending("CANCELLED", "")
FAILED = Ending("UNKNOWN", "the server failed; its log has the details")
"""Of a call whose error nobody has turned into a code."""
