"""The id of a request: the one that its caller sent in ``x-request-id``, or a new one; answers and errors return it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from recinfer.serving.wire.tracing import is_request_id

__all__ = ["REQUEST_ID", "RequestIds"]

REQUEST_ID = "x-request-id"
"""The header of HTTP, and key of gRPC's metadata, that holds a request's id."""
_PREFIX, _DIGITS = 20, 12  # hexadecimal digits: random ones of a server, and a number


class RequestIds:
    """Ids of one server's requests. Any thread may call it."""

    def __init__(self) -> None:
        # A random number per request would take a noticeable part of a small request's time.
        self._prefix = uuid.uuid4().hex[:_PREFIX]
        self._numbers = itertools.count()

    def of(self, given: Any) -> str:
        """``given`` if it is an id of 1 to 128 characters that a header can hold, else a new id of 32 characters."""
        if is_request_id(given):
            return str(given)
        return f"{self._prefix}{next(self._numbers):0{_DIGITS}x}"

    def in_metadata(self, metadata: Sequence[tuple[str, Any]]) -> tuple[str, Sequence[tuple[str, Any]]]:
        """The id of a call, and its metadata with that id."""
        given = None
        for key, value in metadata:
            if key == REQUEST_ID:
                given = value
                break
        found = self.of(given)
        return found, metadata if found is given else (*metadata, (REQUEST_ID, found))
