"""The socket that shard servers have beside gRPC's port, over which rankers ask.

gRPC finds servers, says whether they are well and tells of this socket: its port, and who answers there. Each end of a
connection begins with one message: the server's says who it is and a number, the asker's proves by an HMAC over both that it
has the token, without sending it. Then a question comes, its answer goes, and so on, serialized as for ``FindEach``. Where
there is TLS there is no such socket.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections import OrderedDict
from functools import cache, partial

from recinfer.errors import UnavailableError
from recinfer.serving.server.grpc_call import Each
from recinfer.serving.server.serial_connection import Way
from recinfer.serving.shards.frames import FrameLoop, Frames, frame, tune

__all__ = ["ANSWER_THREAD", "AnswerSockets", "AskSocket"]

ANSWER_THREAD = "recinfer-grpc-sockets"
"""Name of the thread that answers; what starts as gRPC's own is counted with it."""

_HELLO = b"recinfer.find.1\n"
_ID_BYTES = 32
_PROOF_BYTES = 1024  # that may come from who has not proved anything, more than a proof has
_SILENT, _CONNECTIONS = 64, 4096  # that may be open: without a proof, and in all
_CONNECT_S = 3.0
_MOST_ANSWER = 2**32 - 1

_log = logging.getLogger(__name__)


class AnswerSockets:
    """The server's end, with a thread of its own.

    Args:
        each: answers a question, on that thread.
        token: that askers have; None: anybody may ask.
        most: bytes of a question. Memory for one is had by who may ask.

    Attributes:
        server_id: 32 bytes that no other server has.
        port: that is listened on.
        thread_id: native id of its thread.

    Raises:
        UnavailableError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, each: Each, token: str | None, most: int) -> None:
        self._each, self._token, self._most = each, token, most
        self.server_id = secrets.token_bytes(_ID_BYTES)
        try:
            listener = _listener(host, port)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port} for rankers' lookups: {error.strerror or error}"
            ) from None
        self.port = int(listener.getsockname()[1])
        # Without proof yet: what each has to send. One that sends nothing has its place until others need it.
        self._silent: OrderedDict[Frames, bytes] = OrderedDict()
        self._trusted: set[Frames] = set()
        self._asked: set[Frames] = set()  # who waits for an answer
        self._loop = FrameLoop(ANSWER_THREAD)
        self.thread_id = self._loop.thread_id
        self._loop.accept(listener, self._came)

    def close(self) -> None:
        """End all connections; what is asked then is told UNAVAILABLE at the other end."""
        self._loop.close()

    # -- on its thread

    def _came(self, sock: socket.socket) -> None:
        if len(self._trusted) >= _CONNECTIONS:
            sock.close()
            return
        if len(self._silent) >= _SILENT:
            self._silent.popitem(last=False)[0].end()
        tune(sock)
        frames = Frames(sock, _PROOF_BYTES, self._took, self._over)
        number = secrets.token_bytes(_ID_BYTES)
        self._silent[frames] = _HELLO + _proof(self._token, self.server_id + number)
        self._loop.add(frames)
        frames.send(_HELLO + self.server_id + number)

    def _took(self, frames: Frames, message: bytes) -> None:
        if frames not in self._trusted:
            proof = self._silent.pop(frames, None)
            if proof is not None and (self._token is None or hmac.compare_digest(message, proof)):
                self._trusted.add(frames)
                frames.most = self._most
            else:
                frames.end()
        elif frames in self._asked or frames.is_sending:  # it asks on before it was answered: memory is for one answer
            frames.end()
        else:
            self._asked.add(frames)
            self._each(message, partial(self._reply, frames))

    def _reply(self, frames: Frames, answer: bytes) -> None:
        """On any thread."""
        self._asked.discard(frames)  # before it is sent, as the next question may come then
        frames.send(answer)

    def _over(self, frames: Frames, why: str) -> None:
        self._trusted.discard(frames)
        self._silent.pop(frames, None)


class AskSocket(Way):
    """The asker's end. It connects on a thread of its own, since names may take seconds to resolve.

    Args:
        host, port: of the server's socket.
        server_id: who is expected there.
        token: of the server, if it has one.
    """

    def __init__(self, host: str, port: int, server_id: bytes, token: str | None) -> None:
        super().__init__()
        self._address, self._server_id, self._token = (host, port), server_id, token
        self._frames: Frames | None = None
        threading.Thread(target=self._connect, name="recinfer-connects", daemon=True).start()

    def _connect(self) -> None:
        try:
            sock = socket.create_connection(self._address, _CONNECT_S)
        except OSError as error:
            self._cannot(error)
            return
        try:
            tune(sock)
            greeting = frame(_HELLO + self._server_id + bytes(_ID_BYTES))[:-_ID_BYTES]
            found = _exactly(sock, len(greeting) + _ID_BYTES)
            if not found.startswith(greeting):
                raise OSError("another server is there")
            sock.sendall(frame(_HELLO + _proof(self._token, found[-2 * _ID_BYTES :])))
        except OSError as error:
            sock.close()
            self._cannot(error)
            return
        self._frames = Frames(sock, _MOST_ANSWER, self._took, self._over)
        if _asks_loop().add(self._frames):
            self._opened()
        if self._closes:
            self._frames.end()

    def _cannot(self, error: OSError) -> None:
        why = error.strerror or str(error)
        _log.info("%s:%d is done without: %s", *self._address, why)
        self._ended("UNAVAILABLE", why)

    def _send(self, question: bytes) -> bool:
        assert self._frames is not None
        return self._frames.send(question)

    def _end(self) -> None:
        if self._frames is not None:
            self._frames.end()

    # -- on the loop's thread

    def _took(self, frames: Frames, message: bytes) -> None:
        if not self._answered(message):
            frames.end()  # nobody asked

    def _over(self, frames: Frames, why: str) -> None:
        self._ended("UNAVAILABLE", why)


def _asks_loop() -> FrameLoop:
    """One thread takes the answers of all servers."""
    with _making:
        return _one_loop()


_making = threading.Lock()
_one_loop = cache(lambda: FrameLoop("recinfer-asks-sockets"))


def _listener(host: str, port: int) -> socket.socket:
    if host in ("::", "[::]"):
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def _proof(token: str | None, of: bytes) -> bytes:
    return hmac.digest((token or "").encode(), of, "sha256")


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = sock.recv(count - len(found))
        if not more:
            raise OSError("the server closed it")
        found += more
    return found
