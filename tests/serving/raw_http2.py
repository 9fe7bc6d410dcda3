"""HTTP/2 by hand, for callers that no gRPC library can simulate: half a message sent, answers never read."""

from __future__ import annotations

import select
import socket
import struct
import time

__all__ = ["RawHttp2", "message"]

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME = 16 << 10


def message(data: bytes, size: int | None = None, *, compressed: bool = False) -> bytes:
    """A gRPC message of ``size`` bytes, by default those of ``data``, of which ``data`` are there."""
    return struct.pack(">BI", compressed, len(data) if size is None else size) + data


class RawHttp2:
    """One connection. Nothing is read but by :meth:`read`.

    Args:
        port: of a server on this host.
        window: bytes that the server may send on a stream.

    Attributes:
        ended: streams that the server has ended, in that order.
        sent_away: why the server takes no more calls on this connection; None: it does.
        received: bytes of data by stream.
    """

    def __init__(self, port: int, window: int = 65535) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", 4, window))
        self._streams = 0
        self._initial = self._left = 65535  # what may be sent: on a new stream, on the connection
        self._left_of: dict[int, int] = {}
        self._buffer = b""
        self.ended: list[int] = []
        self.sent_away: str | None = None
        self.received: dict[int, int] = {}
        self._pings = 0

    def call(self, path: str, data: bytes = b"", *, end: bool = False, **headers: str) -> int:
        """Begin a call, with ``data`` of its body; ``end``: there is no more. Returns its stream."""
        stream = 2 * self._streams + 1
        self._streams += 1
        self._left_of[stream] = self._initial
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        fields |= {"content-type": "application/grpc"} | {name.replace("_", "-"): v for name, v in headers.items()}
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._send(_HEADERS, _END_HEADERS, stream, block)
        if data or end:
            self.send(stream, data, end=end)
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False, seconds: float = 60.0) -> int:
        """Send ``data`` on ``stream`` as the server lets it in; returns how much went, all but where the stream is ended."""
        sent, until = 0, time.monotonic() + seconds
        while stream not in self.ended and (sent < len(data) or (end and not data)):
            size = min(_FRAME, self._left, self._left_of[stream], len(data) - sent)
            if size > 0 or not data:
                is_last = end and sent + size == len(data)
                self._send(_DATA, _END_STREAM * is_last, stream, data[sent : sent + size])
                sent, self._left, self._left_of[stream] = sent + size, self._left - size, self._left_of[stream] - size
                if is_last:
                    break
            else:
                assert time.monotonic() < until, "the server takes no more"
            self.read(0.0 if size > 0 else 0.1)
        return sent

    def read(self, seconds: float = 0.0) -> None:
        """Read the data that has arrived, or wait up to ``seconds`` for some. Raises ConnectionResetError if the connection is closed."""
        begun = False
        while select.select([self._socket], [], [], seconds)[0]:
            seconds = 0.0
            found = self._socket.recv(1 << 20)
            if not found and begun:
                return
            begun = True
            if not found:
                raise ConnectionResetError("the server closed the connection")
            self._buffer += found
            while len(self._buffer) >= 9:
                length = int.from_bytes(self._buffer[:3], "big")
                if len(self._buffer) < 9 + length:
                    break
                kind, flags = self._buffer[3:5]
                stream = int.from_bytes(self._buffer[5:9], "big") & (1 << 31) - 1
                self._took(kind, flags, stream, self._buffer[9 : 9 + length])
                self._buffer = self._buffer[9 + length :]

    def until_ended(self, count: int, seconds: float = 60.0) -> None:
        """Read until so many streams have ended."""
        until = time.monotonic() + seconds
        while len(self.ended) < count:
            assert time.monotonic() < until, f"{len(self.ended)} of {count} have ended"
            self.read(0.1)

    def grant(self, stream: int, size: int) -> None:
        """Let the server send so many bytes more on ``stream``, and on the connection."""
        for each in (stream, 0):
            self._send(_WINDOW, 0, each, struct.pack(">I", size))

    def settle(self, seconds: float = 60.0) -> None:
        """Read until the server has read all that was sent."""
        pings, until = self._pings, time.monotonic() + seconds
        self._send(_PING, 0, 0, bytes(8))
        while self._pings == pings:
            assert time.monotonic() < until, "the server does not read"
            self.read(0.1)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> RawHttp2:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _took(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    for each in self._left_of:
                        self._left_of[each] += value - self._initial
                    self._initial = value
            self._send(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING:
            self._pings += flags & _ACK
            if not flags & _ACK:
                self._send(_PING, _ACK, 0, payload)
        elif kind == _WINDOW:
            (size,) = struct.unpack(">I", payload)
            if stream == 0:
                self._left += size
            elif stream in self._left_of:
                self._left_of[stream] += size
        elif kind == _GOAWAY:
            self.sent_away = payload[8:].decode()
        elif kind == _DATA:
            self.received[stream] = self.received.get(stream, 0) + len(payload)
        if (kind == _RST or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)) and stream not in self.ended:
            self.ended.append(stream)

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)


def _text(text: str) -> bytes:
    """A string in HPACK without compression; up to 126 bytes."""
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data
