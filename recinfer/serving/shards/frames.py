"""Framed messages over TCP and TLS, and the thread on which both ends of the shard servers' transport run.

A frame is the length of its message (4 bytes, little-endian), the number of its request (8 bytes), and the message. Numbers
let answers come in any order, so no request waits for the answer to another.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from recinfer.serving.wire.loop import STOP_SLACK_S, new_loop

__all__ = ["MOST_BYTES", "FrameProtocol", "ShardsThread", "keep_alive"]

MOST_BYTES = 2**32 - 1
"""The most bytes of one message, whose length has to fit the frame's head."""

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<IQ")
_READ_BYTES = 256 << 10  # most bytes of one read: most messages come whole
# A connection ends if less than 64 KiB of a message that has begun come within 10 s, since the message holds memory.
_PROGRESS_BYTES, _PROGRESS_S, _GRACE_S = 64 << 10, 10.0, 0.5
_FLUSH_S, _LOOK_S = 1.0, 0.01
# TCP detects a host that fails silently in three seconds, as gRPC's keepalive does. Its user timeout also ends a connection
# whose other end reads nothing for three seconds while bytes wait for it.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 1), ("TCP_USER_TIMEOUT", 3_000))


def keep_alive(sock: socket.socket) -> None:
    """Have a TCP connection end when the other host is gone; the connections of a listening socket inherit these options."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [(socket.IPPROTO_TCP, getattr(socket, n), value) for n, value in _KEEP_ALIVE if hasattr(socket, n)]
    for option in options:
        sock.setsockopt(*option)


class ShardsThread:
    """An event loop in a thread named recinfer-shards. Any thread may call its methods, with the exceptions noted there.

    Attributes:
        loop: the event loop.
        thread_id: the thread's native id.
        scratch: buffer into which connections read; valid until the end of the turn.
        connections: the open connections; changed on the thread alone.
    """

    def __init__(self) -> None:
        self.loop = new_loop()
        self.scratch = memoryview(bytearray(_READ_BYTES))
        self.connections: set[FrameProtocol] = set()
        self._work: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
        self._thread = threading.Thread(target=self._run, name="recinfer-shards", daemon=True)
        self._thread.start()
        self.thread_id = self._thread.native_id

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function`` on the thread; at once if the caller runs on the thread. Functions that are passed before its turn
        begins share one wake-up.
        """
        if threading.get_ident() == self._thread.ident:
            function(*args)
            return
        self._work.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            try:
                self.loop.call_soon_threadsafe(self._call_all)
            except RuntimeError:  # the thread has ended: no callback is left
                self._work.clear()

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """Call ``function`` when the messages of this turn of the thread are handled; on another thread, at once."""
        if threading.get_ident() == self._thread.ident:
            self.loop.call_soon(function)
        else:
            function()

    def close(self) -> None:
        """Close all connections after flushing their send buffers, then end the thread. Call on any other thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end_connections(), self.loop).result(STOP_SLACK_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_SLACK_S)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def _call_all(self) -> None:
        self._is_woken = False  # before the first function is taken: a later function wakes the thread again
        while self._work:
            function, args = self._work.popleft()
            try:
                function(*args)
            except Exception:
                _log.exception("work of the shards' thread failed")

    async def _end_connections(self) -> None:
        for connection in tuple(self.connections):
            connection.close("the server stops")
        end = self.loop.time() + _FLUSH_S
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(_LOOK_S)
        for connection in tuple(self.connections):
            connection.end("the server stops")


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a connection; its methods run on its thread. A subclass handles the messages.

    Args:
        thread: the thread on which the connection runs.
        most: largest size of a received message in bytes; a longer message ends the connection.

    Attributes:
        most: see the argument; may be changed.
        why: the reason why the connection has ended or will end; empty while it stays open.
        received: number of received bytes.
    """

    def __init__(self, thread: ShardsThread, most: int) -> None:
        self.thread = thread
        self.most = most
        self.why = ""
        self._transport: Any = None
        self._sent = 0
        self._head = b""  # received bytes of an incomplete head
        self._message: bytearray | None = None  # an incomplete message, its number, and its received bytes
        self._number = self._got = 0
        self._skipping = 0  # bytes to come of a message without room in memory
        self.received = 0
        self._progress: asyncio.TimerHandle | None = None
        self._since, self._since_bytes = 0.0, 0  # time of the last look at progress, and bytes received by then

    # -- of subclasses

    def opened(self) -> None:
        """Called when the connection is open."""

    def take_message(self, number: int, message: bytes | bytearray) -> None:
        """Handle a received message. An exception ends the connection."""
        raise NotImplementedError

    def begins(self, size: int) -> bool:
        """Called when a message of ``size`` bytes begins; returns whether there is room, else its bytes are skipped."""
        return True

    def skipped(self, number: int) -> None:
        """Called when a message without room has come to its end."""

    def lost(self) -> None:
        """Called when the connection has ended; ``why`` has the reason."""

    # -- for subclasses

    def unsent(self) -> tuple[int, int]:
        """Number of bytes that the other end has acknowledged, and number that wait here or in this system."""
        waiting = int(self._transport.get_write_buffer_size())
        if (sock := self._transport.get_extra_info("socket")) is not None:
            with suppress(OSError):
                (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
                waiting += queued
        return self._sent - waiting, waiting

    def send(self, number: int, message: bytes) -> None:
        """Send a message, unless the connection ends. uvloop's transports write all that one turn sends at once."""
        if self.why:
            return
        self._transport.writelines((_HEAD.pack(len(message), number), message))
        self._sent += _HEAD.size + len(message)

    def end(self, why: str) -> None:
        """End the connection at once."""
        self.why = self.why or why
        if self._transport is not None:
            self._transport.abort()

    def close(self, why: str) -> None:
        """Close the connection after flushing the send buffer."""
        self.why = self.why or why
        self._transport.close()

    def _look_at_progress(self, has_waited: bool = False) -> None:
        """End a connection whose message makes no progress. ``has_waited``: there was none at the last look either, a moment
        ago; one look is not enough, since this process may have been stopped before it."""
        self._progress = None
        if self._message is None and not self._skipping:
            return
        now, wait = self.thread.loop.time(), _PROGRESS_S
        if now - self._since < _PROGRESS_S:  # a new message since the last look
            wait, has_waited = self._since + _PROGRESS_S - now, False
        elif self.received - self._since_bytes >= _PROGRESS_BYTES:
            self._since, self._since_bytes, has_waited = now, self.received, False
        elif not has_waited:
            wait, has_waited = _GRACE_S, True
        else:
            self.end(f"less than {_PROGRESS_BYTES >> 10} KiB of a message came within {_PROGRESS_S:g} s")
            return
        self._progress = self.thread.loop.call_later(wait, self._look_at_progress, has_waited)

    # -- asyncio's

    def connection_made(self, transport: Any) -> None:
        """See asyncio.BaseProtocol."""
        self._transport = transport
        self.thread.connections.add(self)
        if self.why:  # the connection was ended before it was open
            transport.abort()
        else:
            self.opened()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self.why = self.why or (str(error) if error else "the other end closed it")
        self.thread.connections.discard(self)
        if self._progress is not None:
            self._progress.cancel()
        self._message = None
        self.lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self.thread.scratch if self._message is None else memoryview(self._message)[self._got :]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self.received += nbytes
        try:
            self._read(nbytes)
        except Exception:
            _log.exception("a message was lost")
            self.end("this end failed")

    def _read(self, count: int) -> None:
        if self._message is not None:  # the bytes were read straight into the message
            self._got += count
            if self._got == len(self._message):
                message, self._message = self._message, None
                self.take_message(self._number, message)
            return
        data, at = self.thread.scratch[:count], 0
        if self._skipping:
            at = min(self._skipping, len(data))
            self._skipping -= at
            if self._skipping:
                return
            self.skipped(self._number)
        if self._head:
            data, self._head = memoryview(self._head + data), b""
        while len(data) - at >= _HEAD.size and not self.why:
            size, number = _HEAD.unpack_from(data, at)
            if size > self.most:
                self.end(f"a message of {size} bytes came, of which {self.most} may")
                return
            at += _HEAD.size
            if len(data) - at < size:
                self._begin(number, size, data[at:])
                return
            self.take_message(number, bytes(data[at : at + size]))
            at += size
        self._head = bytes(data[at:])

    def _begin(self, number: int, size: int, data: memoryview) -> None:
        """Begin a message of ``size`` bytes, of which ``data`` has come."""
        self._number = number
        if self.begins(size):
            self._message, self._got = bytearray(size), len(data)
            self._message[: self._got] = data
        else:
            self._skipping = size - len(data)
        self._since, self._since_bytes = self.thread.loop.time(), self.received
        if self._progress is None:
            self._progress = self.thread.loop.call_later(_PROGRESS_S, self._look_at_progress)
