"""Compressed bodies of HTTP requests: unpacked up to a limit, and so many at a time that memory holds them."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from recinfer.errors import InputError

__all__ = ["ENCODINGS", "Bytes", "Held", "TooLargeError", "largest", "unpack"]

ENCODINGS = ("gzip", "deflate")
_PIECE, _STEP = 64 << 10, 1 << 20  # bytes that zlib takes, and gives, at a time
_MOST_TIMES = 1032  # what deflate can make of a byte
_GZIP, _ZLIB, _BARE = 31, 15, -15  # zlib's names of the three forms


class TooLargeError(InputError):
    """A body that is larger than it may be when it is unpacked."""


def largest(packed: int, most: int) -> int:
    """Bytes that ``packed`` bytes can become, at most ``most`` and one step."""
    return min(most, packed * _MOST_TIMES) + _STEP


def unpack(body: bytes, encoding: str, most: int) -> bytearray:
    """What ``body`` holds, packed as the header ``Content-Encoding`` names it. Frees the interpreter while it works.

    Raises:
        InputError: bytes that are no one whole stream of that encoding, or an encoding that is none of ``ENCODINGS``.
        TooLargeError: it holds more than ``most`` bytes; no more than these were unpacked.
    """
    if encoding not in ENCODINGS:
        raise InputError(f"Content-Encoding: got {encoding[:40]!r}, expected gzip or deflate, or a plain body")
    # "deflate" is zlib's form by the standard, and deflate's bare one by many who write it.
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


def _feed(stream: zlib._Decompress, piece: bytes, found: bytearray, most: int) -> None:
    while not stream.eof:
        room = min(_STEP, most + 1 - len(found))
        step = stream.decompress(piece, room)
        found += step
        if len(found) > most:
            raise TooLargeError(f"body: got more than {most} bytes, expected at most that many")
        piece = stream.unconsumed_tail
        if not piece and len(step) < room:  # else zlib may have more of what it was given
            return


class Bytes:
    """So many bytes that may be taken at a time; who finds too few waits, first come, first served. On one event loop."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, amount: int) -> AsyncIterator[Held]:
        """``amount`` of them (all, where there are fewer), until the end of the block."""
        held = Held(self, min(amount, self._most))
        await self._wait(held.amount)
        try:
            yield held
        finally:
            held.shrink(0)

    def give(self, amount: int) -> None:
        """Take back ``amount``."""
        self._left += amount
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._left):
            wanted, turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                self._left -= wanted
                turn.set_result(None)

    async def _wait(self, amount: int) -> None:
        if not self._waiting and amount <= self._left:
            self._left -= amount
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self.give(0 if turn.cancelled() else amount)  # it may have been its turn in that moment
            raise


class Held:
    """Bytes that one has of a :class:`Bytes`."""

    def __init__(self, whose: Bytes, amount: int) -> None:
        self._whose, self.amount = whose, amount

    def shrink(self, amount: int) -> None:
        """Give back all but ``amount``."""
        back, self.amount = self.amount - amount, amount
        self._whose.give(back)
