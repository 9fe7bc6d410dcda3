"""Compresses large answers in text with gzip for callers that accept it."""

from __future__ import annotations

import gzip
import re

from aiohttp import web

from recinfer.errors import OverloadedError
from recinfer.serving.engine.memory_budget import Ticket
from recinfer.serving.wire.loop import off_loop

__all__ = ["accepts_gzip", "packed"]

_LEAST_BYTES = 8 << 10
_LEVEL = 1  # 100 MB/s and more; higher levels take several times as long for a few percent
_TEXTS = ("application/json", "text/")
_WEIGHT = re.compile(r"\s*q\s*=\s*([0-9.]+)\s*", re.IGNORECASE)


def accepts_gzip(header: str) -> bool:
    """Whether a caller with this header ``Accept-Encoding`` takes gzip."""
    weights: dict[str, float] = {}
    for item in header.lower().split(","):
        name, _, parameters = item.partition(";")
        weight = _WEIGHT.fullmatch(parameters)
        try:
            weights[name.strip()] = 1.0 if weight is None else float(weight[1])
        except ValueError:
            weights[name.strip()] = 0.0
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


async def packed(request: web.Request, answer: web.Response, ticket: Ticket) -> web.Response:
    """``answer``, compressed if it is large, text, and the caller accepts that.

    Args:
        ticket: holds the answer's bytes, and those of the result afterwards.
    """
    body = answer.body
    if not isinstance(body, bytes) or len(body) < _LEAST_BYTES or "Content-Encoding" in answer.headers:
        return answer
    if not answer.content_type.startswith(_TEXTS):
        return answer
    answer.headers.add("Vary", "Accept-Encoding")
    if not accepts_gzip(request.headers.get("Accept-Encoding", "")):
        return answer
    held = ticket.held
    try:
        ticket.grow(len(body))
    except OverloadedError:  # the answer fits as it is
        return answer
    smaller = await off_loop(len(body), _compress, body)
    ticket.resize(max(0, held - len(body)) + len(smaller))
    headers = answer.headers.copy()
    headers.popall("Content-Length", None)
    headers["Content-Encoding"] = "gzip"
    return web.Response(body=smaller, status=answer.status, headers=headers)


def _compress(body: bytes) -> bytes:
    return gzip.compress(body, _LEVEL, mtime=0)
