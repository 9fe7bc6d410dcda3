"""Compression over HTTP: bodies of requests, unpacked up to a limit, and large answers in text for callers that accept gzip."""

from __future__ import annotations

import gzip
import re
import zlib

from aiohttp import web

from recinfer.errors import InputError, OverloadedError
from recinfer.serving.engine.memory_budget import Ticket
from recinfer.serving.wire.loop import off_loop

__all__ = ["ENCODINGS", "TooLargeError", "accepts_gzip", "largest", "packed", "unpack"]

ENCODINGS = ("gzip", "deflate")
_PIECE, _STEP = 64 << 10, 1 << 20  # bytes that zlib takes, and returns, at a time
_MOST_TIMES = 1032  # largest expansion of a byte by deflate
_GZIP, _ZLIB, _BARE = 31, 15, -15  # zlib's names of the three forms


class TooLargeError(InputError):
    """A body that is too large, compressed or unpacked."""


def largest(packed: int, most: int) -> int:
    """Upper bound on the bytes to which ``packed`` bytes unpack: ``most`` and one step at most."""
    return min(most, packed * _MOST_TIMES) + _STEP


def unpack(body: bytes | bytearray, encoding: str, most: int) -> bytearray:
    """Unpack ``body``, whose header ``Content-Encoding`` is ``encoding``. The interpreter's lock is released meanwhile.

    Raises:
        InputError: ``body`` is not exactly one whole stream of the encoding, or the encoding is not in ``ENCODINGS``.
        TooLargeError: the content has more than ``most`` bytes; unpacking stopped there.
    """
    if encoding not in ENCODINGS:
        raise InputError(f"Content-Encoding: got {encoding[:40]!r}, expected gzip or deflate, or a plain body")
    # "deflate" is zlib's form by the standard, and bare deflate in the requests of many clients.
    is_bare = encoding == "deflate" and body[:1] and body[0] & 0x0F != 8
    stream = zlib.decompressobj(_GZIP if encoding == "gzip" else _BARE if is_bare else _ZLIB)
    found = bytearray()
    try:
        for start in range(0, len(body), _PIECE):
            _feed(stream, body[start : start + _PIECE], found, most)
            rest = len(stream.unused_data) + max(0, len(body) - start - _PIECE)
            if stream.eof and rest:
                raise InputError(f"body: got {rest} bytes behind the end of its {encoding} stream, expected none")
    except zlib.error as error:
        raise InputError(f"body: cannot be read ({error}), expected one as its Content-Encoding says") from None
    if not stream.eof:
        raise InputError(f"body: cannot be read: its {encoding} stream ends too early, after {len(body)} bytes")
    return found


def _feed(stream: zlib._Decompress, piece: bytes | bytearray, found: bytearray, most: int) -> None:
    while not stream.eof:
        left = min(_STEP, most + 1 - len(found))
        step = stream.decompress(piece, left)
        found += step
        if len(found) > most:
            raise TooLargeError(f"body: got more than {most} bytes, expected at most that many")
        piece = stream.unconsumed_tail
        if not piece and len(step) < left:  # a full step means that zlib may have more output
            return


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
