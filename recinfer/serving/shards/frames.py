"""Messages over plain sockets, each behind its length; one thread takes what comes on all of them.

For small messages that are answered at once: gRPC's stack takes several times what the kernel does for them.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["FrameLoop", "Frames", "frame", "tune"]

_log = logging.getLogger("recinfer.serving.server")
_HEAD = struct.Struct("<I")
_READ_BYTES = 256 << 10  # at a time: most messages come whole
_STOP_S = 5.0
_FULL_S = 0.01  # between two tries to accept where no descriptor is left
# A host that has gone without a word is found out in three seconds, as gRPC's keepalive does.
_IDLE_S, _PROBE_S, _PROBES, _UNHEARD_MS = 2, 1, 1, 3_000


def frame(message: bytes) -> bytes:
    """``message`` as it travels: its length in four bytes, little-endian, and itself."""
    return _HEAD.pack(len(message)) + message


def tune(sock: socket.socket) -> None:
    """Set a TCP connection up for small messages, and to end when the other host is gone."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    more = (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNHEARD_MS),
    )
    options += [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in more if hasattr(socket, name)]
    for option in options:
        sock.setsockopt(*option)


class Frames:
    """One connection.

    Args:
        sock: connected; it is this object's now.
        most: bytes of a message that may come; a longer one ends the connection.
        took: is given each message, on the loop's thread. What it raises ends the connection.
        over: is told why it has ended, on the loop's thread, once.

    Attributes:
        most: may be changed on the loop's thread.
    """

    __slots__ = ("_frame", "_got", "_head", "_left", "_lock", "_loop", "_over", "_sock", "_took", "most", "number")

    def __init__(
        self, sock: socket.socket, most: int, took: Callable[[Frames, bytes], None], over: Callable[[Frames, str], None]
    ) -> None:
        sock.setblocking(False)
        self._sock, self.most, self._took, self._over = sock, most, took, over
        self.number = sock.fileno()
        self._lock = threading.Lock()  # of what is sent
        self._left = b""
        self._head = b""  # the beginning of a length
        self._frame: bytearray | None = None  # of a message that has not come whole, and how much of it has
        self._got = 0
        self._loop: FrameLoop | None = None

    @property
    def is_sending(self) -> bool:
        """Something that was sent has not been taken by the system yet."""
        return bool(self._left)

    def send(self, message: bytes) -> bool:
        """Any thread, once the connection is a loop's. False: it has ended."""
        with self._lock:
            if self._loop is None:
                return False
            try:
                sent = 0 if self._left else self._sock.sendmsg((_HEAD.pack(len(message)), message))
            except BlockingIOError:
                sent = 0
            except OSError:  # its thread hears of it too
                return False
            if sent < _HEAD.size + len(message):
                self._left += frame(message)[sent:]
                self._loop.watch(self, writing=True)
            return True

    def end(self) -> None:
        """Have it end; any thread. Its ``over`` is told on the loop's."""
        with self._lock:
            if self._loop is not None:
                with suppress(OSError):  # it has ended
                    self._sock.shutdown(socket.SHUT_RDWR)

    # -- on the loop's thread

    def begin(self, loop: FrameLoop) -> None:
        """It is a loop's now."""
        self._loop = loop

    def write(self) -> None:
        """Send what is left."""
        with self._lock:
            try:
                self._left = self._left[self._sock.send(self._left) :]
            except BlockingIOError:
                return
            if not self._left and self._loop is not None:
                self._loop.watch(self, writing=False)

    def read(self, scratch: bytearray) -> str | None:
        """Take what has come; why the connection has to end, or None."""
        if self._frame is not None:  # straight to where it belongs
            count = self._sock.recv_into(memoryview(self._frame)[self._got :])
            self._got += count
            if self._got == len(self._frame):
                whole, self._frame = bytes(self._frame), None
                self._took(self, whole)
            return None if count else "the other end closed it"
        count = self._sock.recv_into(scratch)
        if not count:
            return "the other end closed it"
        data, at = memoryview(scratch)[:count], 0
        if self._head:
            data = memoryview(self._head + data)
            self._head = b""
        while len(data) - at >= _HEAD.size:
            (size,) = _HEAD.unpack_from(data, at)
            if size > self.most:
                return f"a message of {size} bytes came, of which {self.most} may"
            at += _HEAD.size
            if len(data) - at < size:
                self._frame, self._got = bytearray(size), len(data) - at
                self._frame[: self._got] = data[at:]
                return None
            self._took(self, bytes(data[at : at + size]))
            at += size
        self._head = bytes(data[at:])
        return None

    def finish(self, why: str) -> None:
        """It has ended."""
        with self._lock:
            self._loop = None
            self._sock.close()
        self._over(self, why)


class FrameLoop:
    """A thread for connections, and for who accepts them.

    Args:
        name: of the thread.

    Attributes:
        thread_id: its native id.
    """

    def __init__(self, name: str) -> None:
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._frames: dict[int, Frames] = {}
        self._accepts: dict[int, tuple[socket.socket, Callable[[socket.socket], None]]] = {}
        self._ends = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.thread_id = self._thread.native_id

    def add(self, frames: Frames) -> bool:
        """Take what comes on a connection from now on; any thread. False: this loop has ended."""
        with self._lock:
            if self._ends:
                return False
            frames.begin(self)
            self._frames[frames.number] = frames
            self._poll.register(frames.number, select.EPOLLIN)
        return True

    def accept(self, listener: socket.socket, came: Callable[[socket.socket], None]) -> None:
        """Call ``came`` with each connection that comes; ``listener`` is this loop's now."""
        listener.setblocking(False)
        with self._lock:
            self._accepts[listener.fileno()] = listener, came
            self._poll.register(listener.fileno(), select.EPOLLIN)

    def watch(self, frames: Frames, *, writing: bool) -> None:
        """Look whether ``frames`` can be written to, in place of what comes, or the other way round; any thread."""
        with suppress(OSError, ValueError):  # it has ended
            self._poll.modify(frames.number, select.EPOLLOUT if writing else select.EPOLLIN)

    def close(self) -> None:
        """End all connections and the thread; not on it."""
        with self._lock:
            if self._ends:
                return
            self._ends = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        scratch = bytearray(_READ_BYTES)
        while not self._ends:
            for number, events in self._poll.poll():
                frames = self._frames.get(number)
                if frames is not None:
                    self._turn(frames, events, scratch)
                elif number in self._accepts:
                    self._accept(*self._accepts[number])
        for frames in tuple(self._frames.values()):
            self._finish(frames, "the server stops")
        for listener, _ in self._accepts.values():
            listener.close()
        self._poll.close()
        os.close(self._wake)

    def _turn(self, frames: Frames, events: int, scratch: bytearray) -> None:
        try:
            why = None
            if events & select.EPOLLOUT:
                frames.write()
            if events & ~select.EPOLLOUT:
                why = frames.read(scratch)
        except BlockingIOError:
            return
        except OSError as error:
            why = error.strerror or str(error)
        except Exception:
            _log.exception("a message was lost")
            why = "this end failed"
        if why is not None:
            self._finish(frames, why)

    def _finish(self, frames: Frames, why: str) -> None:
        with self._lock:
            self._frames.pop(frames.number, None)
        try:
            frames.finish(why)  # closing takes it from those that are looked at
        except Exception:
            _log.exception("the end of a connection was lost")

    def _accept(self, listener: socket.socket, came: Callable[[socket.socket], None]) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("a connection could not be accepted: %s", error)
            time.sleep(_FULL_S)
            return
        try:
            came(sock)
        except OSError:  # it is gone already
            sock.close()
