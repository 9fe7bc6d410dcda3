"""The status of a call that ends without an answer: its gRPC code, message and trailing metadata."""

from __future__ import annotations

from dataclasses import dataclass

from recinfer.serving.wire.retry import trailing_of
from recinfer.serving.wire.status import status_of

__all__ = ["CANCELLED", "FAILED", "Ending", "ending_of"]


@dataclass(frozen=True)
class Ending:
    """The status of a call that ends without an answer.

    Attributes:
        code: name of its ``grpc.StatusCode``.
        message: text for the client.
        trailing: trailing metadata.
    """

    code: str
    message: str
    trailing: tuple[tuple[str, str | bytes], ...] = ()


def ending_of(error: Exception) -> Ending:
    """The status of a call that failed with ``error``."""
    status = status_of(error)
    return Ending(status.code, status.message, trailing_of(error, status.message))


CANCELLED = Ending("CANCELLED", "")
FAILED = Ending("UNKNOWN", "the server failed; its log has the details")
"""The status of a call whose error was not turned into a code."""
