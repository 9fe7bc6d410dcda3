"""Admission: calls without the token, and calls that the queue cannot take, are ended before their message is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from recinfer.errors import OverloadedError
from recinfer.serving.engine.scheduler import QueueBudget
from recinfer.serving.server.grpc_call import Ending, ending_of
from recinfer.serving.server.security import NO_TOKEN, Security
from recinfer.serving.server.telemetry.observe import Observer

__all__ = ["Admission", "names_of"]

_log = logging.getLogger("recinfer.serving.server")


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
        self._observer = observer
        self._queue = queue
        self._methods = dict(methods or {})
        self._names = dict(names or {})
        self._last_refusal: tuple[OverloadedError | None, Ending] = (None, NO_TOKEN)

    def admit(self, path: str, deadline: float, metadata: Sequence[tuple[str, Any]]) -> Ending | None:
        """The status of a call that is not admitted; see recinfer.serving.server.grpc_core.Admit."""
        call = self._methods.get(path)
        if not self.security.admits(path, metadata):
            self.refused(path, NO_TOKEN.code, metadata)
            return NO_TOKEN
        if call is None or self._queue is None or (error := self._queue.refused(deadline)) is None:
            return None
        last_error, ending = self._last_refusal
        if error is not last_error:
            ending = ending_of(error)
            self._last_refusal = error, ending
        self._observer.refused(call, ending.code, metadata)
        return ending

    def refused(self, path: str, code: str, metadata: Sequence[tuple[str, Any]]) -> None:
        """Count a call that was ended; see recinfer.serving.server.grpc_core.Refused."""
        self._observer.refused(self._names.get(path, "other"), code, metadata)


def names_of(*services: ServiceDescriptor) -> dict[str, str]:
    """The name of each method of ``services`` by its full path."""
    return {f"/{service.full_name}/{method.name}": method.name for service in services for method in service.methods}
