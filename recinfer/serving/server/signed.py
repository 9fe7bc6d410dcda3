"""Fills in the client's identity in admin requests, as the server knows it, instead of the client's own claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recinfer.serving.server.grpc_methods import Answer, core_call
from recinfer.serving.server.security import Security
from recinfer.serving.wire import codec
from recinfer.serving.wire.admin_verbs import VERBS

__all__ = ["signed"]


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
