"""The framed transport between rankers and shard servers: the server's end, which listens, and the ranker's, which connects.

A ranker learns the address over gRPC: a shard server's State has the port and the server's id. Each end of a connection begins
with one message: the server sends its id and a random number, and the ranker proves by an HMAC over both that it has the token,
without sending the token. Then the ranker sends requests, serialized ``ShardRequest``s, and the server answers each under its
number.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from recinfer.errors import OverloadedError, UnavailableError
from recinfer.serving.engine.memory_budget import MemoryBudget, Ticket
from recinfer.serving.shards.frames import MOST_BYTES, FrameProtocol, ShardsThread, keep_alive
from recinfer.serving.wire.address import join_address, listening_socket
from recinfer.serving.wire.limits import Limits

__all__ = ["Answer", "ResponseCallback", "ShardAddress", "ShardConnection", "ShardListener", "rankers_thread"]

ResponseCallback = Callable[["bytes | bytearray | None", str, str], None]
"""Called at a request's end with the response or None, the name of the ``grpc.StatusCode``, and its details."""

Answer = Callable[[bytes, Callable[[bytes], None]], None]
"""Takes a request, on the listener's thread, and a function to call once with the response, at once or later, on any thread."""

_HELLO = b"recinfer.find.2\n"
_ID_BYTES = 32
_PROOF_BYTES = 1024  # bytes that a peer may send before its proof, more than a proof has
_UNPROVED, _CONNECTIONS = 64, 4096  # most open connections: without a proof, and in all
_UNANSWERED = 1024  # requests of one connection
_UNREAD_BYTES = 4 << 20  # unread bytes of responses, above which a connection's next requests are not read
_HANDSHAKE_S, _CONNECT_S = 10.0, 3.0
_EXPIRE_S = 0.05  # between two checks for requests past their deadline
# A connection that a proxy keeps open without passing bytes is found by its silence, since TCP's keepalive sees the
# proxy: a ping after two seconds without a byte, then two more pings, and the end.
_LOOK_S, _SILENT_LOOKS = 2.0, 3
_PINGS_BYTES = 256  # more than the pings of these looks
_PING = 0
"""The number of pings: empty messages that the other end answers. Servers of older releases answer pings as refused
requests."""
_log = logging.getLogger(__name__)


def _proof(token: str | None, of: bytes) -> bytes:
    return hmac.digest((token or "").encode(), of, "sha256")


class ShardListener:
    """The server's end of the transport, with its own thread.

    Args:
        answer: answers a request.
        refuse: returns the response to a request that exceeds the memory budget, or whose connection has too many unanswered
            requests.
        tokens: returns the tokens of which a new connection's ranker must have one; empty: any ranker may connect.
        max_request_bytes: largest size of one request, and of all unanswered requests of one connection together.
        tls: TLS context with the server's certificate; None: no TLS.
        budget: memory budget of requests and responses; None: a budget of the default size.

    Attributes:
        server_id: 32 random bytes that identify the server.
        port: the port on which it listens.
        thread: the thread on which it runs.

    Raises:
        UnavailableError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Answer,
        refuse: Callable[[bytes], bytes],
        *,
        tokens: Callable[[], Sequence[str]] = tuple,
        max_request_bytes: int,
        tls: ssl.SSLContext | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.budget = budget or MemoryBudget(Limits.memory_budget_bytes)
        self.answer = answer
        self.refuse = refuse
        self.tokens = tokens
        self.max_request_bytes = max_request_bytes
        self.server_id = secrets.token_bytes(_ID_BYTES)
        try:
            listening = listening_socket(host, port)
        except UnavailableError as error:
            raise UnavailableError(f"for rankers' lookups: {error}") from None
        keep_alive(listening)
        self.port = int(listening.getsockname()[1])
        # A connection that sends nothing keeps its place until another connection needs it.
        self.unproved: OrderedDict[_RankerConnection, None] = OrderedDict()
        self.thread = ShardsThread()
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": _HANDSHAKE_S}
        loop = self.thread.loop
        made = loop.create_server(lambda: _RankerConnection(self), sock=listening, **options)
        self._server = asyncio.run_coroutine_threadsafe(made, loop).result()

    def close(self) -> None:
        """Take no more connections, and end the open ones: their requests end UNAVAILABLE at the ranker."""
        self.thread.call(self._server.close)
        self.thread.close()


class _RankerConnection(FrameProtocol):
    """The server's end of a connection."""

    def __init__(self, listener: ShardListener) -> None:
        super().__init__(listener.thread, _PROOF_BYTES)
        self._listener = listener
        self._proofs: tuple[bytes, ...] | None = None  # the proofs that are accepted, until one has come
        self._unanswered = self._unanswered_bytes = 0
        self._is_unread = False  # whether the ranker reads too slowly
        self._unread: list[Ticket] = []  # tickets of responses that were sent since
        self._coming: Ticket | None = None  # the ticket of a request that has come in part

    def opened(self) -> None:
        """See FrameProtocol."""
        listener = self._listener
        if len(self.thread.connections) > _CONNECTIONS:
            self.end("too many connections")
            return
        if len(listener.unproved) >= _UNPROVED:
            listener.unproved.popitem(last=False)[0].end("it proved nothing")
        listener.unproved[self] = None
        greeting = listener.server_id + secrets.token_bytes(_ID_BYTES)
        self._proofs = tuple(_HELLO + _proof(token, greeting) for token in listener.tokens())
        self._transport.set_write_buffer_limits(high=_UNREAD_BYTES)
        self.send(0, _HELLO + greeting)

    def take_message(self, number: int, message: bytes | bytearray) -> None:
        """See FrameProtocol."""
        listener = self._listener
        if (proofs := self._proofs) is not None:
            listener.unproved.pop(self, None)
            if not proofs or any(hmac.compare_digest(message, proof) for proof in proofs):
                self._proofs, self.most = None, listener.max_request_bytes
            else:
                self.end("it has not proved that it has the token")
            return
        if number == _PING and not message:
            self.send(_PING, b"")
            return
        request = bytes(message)
        ticket, self._coming = self._coming, None
        ticket = ticket or self._admitted(len(request))
        if ticket is None:
            self.send(number, listener.refuse(request))
            return
        self._unanswered, self._unanswered_bytes = self._unanswered + 1, self._unanswered_bytes + len(request)
        try:
            listener.answer(request, partial(self.thread.call, self._reply, number, request, ticket))
        except BaseException:
            ticket.release()
            raise

    def _admitted(self, size: int) -> Ticket | None:
        """A ticket for a request of ``size`` bytes; None if there is no room for the request."""
        held = self._unanswered_bytes + size
        if self._unanswered >= _UNANSWERED or (self._unanswered and held > self._listener.max_request_bytes):
            return None
        try:
            return self._listener.budget.admit(size)
        except OverloadedError:
            return None

    def begins(self, size: int) -> bool:
        """See FrameProtocol. A request counts in the memory budget from its first byte, however slowly it comes."""
        if self._proofs is not None:
            return True  # a proof has a few bytes
        self._coming = self._admitted(size)
        return self._coming is not None

    def skipped(self, number: int) -> None:
        """See FrameProtocol."""
        self.send(number, self._listener.refuse(b""))

    def _reply(self, number: int, request: bytes, ticket: Ticket, response: bytes) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= len(request)
        try:
            ticket.resize(len(response))
        except OverloadedError:
            response = self._listener.refuse(request)
        self.send(number, response)
        if self._is_unread and not self.why:
            self._unread.append(ticket)
        else:
            ticket.release()

    def lost(self) -> None:
        """See FrameProtocol."""
        self._listener.unproved.pop(self, None)
        if self._coming is not None:
            self._coming.release()
            self._coming = None
        self._release_unread()

    def _release_unread(self) -> None:
        self._is_unread = False
        for ticket in self._unread:
            ticket.release()
        self._unread.clear()

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol: the server stops reading from a ranker that does not read its responses."""
        self._is_unread = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._release_unread()
        self._transport.resume_reading()


@cache
def rankers_thread() -> ShardsThread:
    """The thread of all this process's connections to shard servers; it ends with the process."""
    return ShardsThread()


class ShardAddress(NamedTuple):
    """The address for a shard server's requests, from its State.

    Attributes:
        host, port: address of its listener.
        server_id: id of the server that is expected there.
        max_request_bytes: largest size of a request.
    """

    host: str
    port: int
    server_id: bytes
    max_request_bytes: int


class _Pending:
    """A request that waits for its response."""

    __slots__ = ("deadline", "done")

    def __init__(self, deadline: float, done: ResponseCallback) -> None:
        self.deadline = deadline
        self.done = done


class ShardConnection(FrameProtocol):
    """The ranker's end of a connection. Call all methods but :meth:`connect` on its thread, :func:`rankers_thread`.

    Args:
        token: the server's token, or None.
        max_response_bytes: largest size of one response.
        on_lost: called once when an open connection has ended, before its requests end; ``why`` has the reason.

    Attributes:
        is_open: whether the connection takes requests.
    """

    def __init__(
        self,
        address: ShardAddress,
        token: str | None,
        max_response_bytes: int,
        on_lost: Callable[[ShardConnection], None],
    ) -> None:
        super().__init__(rankers_thread(), min(max_response_bytes, MOST_BYTES))
        self.address = address
        self._token = token
        self._on_lost = on_lost
        self.is_open = False
        self._greeted: asyncio.Future[None] = self.thread.loop.create_future()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._expires: asyncio.TimerHandle | None = None
        self._alive: asyncio.TimerHandle | None = None

    async def connect(self, tls: ssl.SSLContext | None, tls_name: str) -> None:
        """Return when the connection is open; may be awaited on any event loop.

        Args:
            tls, tls_name: TLS context and the name in the server's certificate; None: no TLS.

        Raises:
            UnavailableError: the connection failed; the message has the reason.
        """
        made = self._connect(tls, tls_name)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made, self.thread.loop))

    async def _connect(self, tls: ssl.SSLContext | None, tls_name: str) -> None:
        loop, address = self.thread.loop, self.address
        try:
            async with asyncio.timeout(_CONNECT_S):
                # In another thread, since the resolution of a name may take seconds.
                sock = await loop.run_in_executor(None, socket.create_connection, address[:2], _CONNECT_S)
                keep_alive(sock)
                sock.setblocking(False)
                named: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": tls_name}
                await loop.create_connection(lambda: self, sock=sock, **named)
                await self._greeted
        except BaseException as error:
            self.end("it could not be reached")
            if not isinstance(error, OSError):  # asyncio's TimeoutError is one
                raise
            why = error.strerror or str(error) or f"no answer within {_CONNECT_S:g} s"
            where = join_address(address.host, address.port)
            raise UnavailableError(f"its port for lookups, {where}, cannot be reached: {why}") from None

    def call(self, request: bytes, deadline: float, done: ResponseCallback) -> Callable[[], object]:
        """Send a serialized ``ShardRequest``; returns a function that drops the request, after which ``done`` is not called.

        Args:
            deadline: ``time.monotonic()`` after which the request ends DEADLINE_EXCEEDED.
            done: called once at the request's end, on this thread, after this method has returned.
        """
        number = next(self._numbers)
        loop, most = self.thread.loop, self.address.max_request_bytes
        if not self.is_open:
            return loop.call_soon(done, None, "UNAVAILABLE", self.why).cancel
        if len(request) > most:
            why = f"it takes a request of {len(request)} bytes, and at most {most} may come: send fewer samples per request"
            return loop.call_soon(done, None, "INVALID_ARGUMENT", why).cancel
        self._pending[number] = _Pending(deadline, done)
        self.send(number, request)
        if self._expires is None:
            self._expires = loop.call_later(_EXPIRE_S, self._expire)
        return partial(self._pending.pop, number, None)

    def _expire(self) -> None:
        self._expires = None
        now = time.monotonic()
        for number, pending in tuple(self._pending.items()):
            if now >= pending.deadline and self._pending.pop(number, None) is not None:
                _end(pending, None, "DEADLINE_EXCEEDED", "no answer came in time")
        if self._pending:
            self._expires = self.thread.loop.call_later(_EXPIRE_S, self._expire)

    def take_message(self, number: int, message: bytes | bytearray) -> None:
        """See FrameProtocol."""
        if not self.is_open:
            who = _HELLO + self.address.server_id
            if not message.startswith(who) or len(message) != len(who) + _ID_BYTES:
                self.end("another server, or one of another release, is there")
                return
            self.send(0, _HELLO + _proof(self._token, bytes(message[len(_HELLO) :])))
            self.is_open = True
            self._greeted.set_result(None)
            self._alive = self.thread.loop.call_later(_LOOK_S, self._look_if_alive, (self.received, *self.unsent()), 0)
            return
        pending = self._pending.pop(number, None)
        if pending is not None:  # None: the request was dropped, or the message answers a ping
            _end(pending, message, "OK", "")

    def _look_if_alive(self, before: tuple[int, int, int], silent: int) -> None:
        """End the connection after several looks in a row at which no byte had moved, though pings were sent.

        Received bytes show that the server is alive, and so do sent bytes of a large request, behind which the pings wait.
        Cancelled requests, and answers of other replicas, show nothing.
        """
        received, taken, waiting = before
        # More bytes than those of pings were waiting, and some of them were sent.
        sends = waiting > _PINGS_BYTES and self.unsent()[0] != taken
        silent = 0 if sends or self.received != received else silent + 1
        if silent > _SILENT_LOOKS:
            self.end(f"it has sent nothing for {_SILENT_LOOKS * _LOOK_S:g} s, not even answers to pings")
            return
        if silent:
            self.send(_PING, b"")
        self._alive = self.thread.loop.call_later(_LOOK_S, self._look_if_alive, (self.received, *self.unsent()), silent)

    def lost(self) -> None:
        """See FrameProtocol."""
        if not self._greeted.done():
            self._greeted.set_exception(ConnectionError(self.why))
            self._greeted.exception()  # marks the error as read, as ``connect`` may no longer wait
        for timer in (self._expires, self._alive):
            if timer is not None:
                timer.cancel()
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._on_lost(self)
        # The end of a request may drop others of this connection, so the loop takes none from a copy.
        while self._pending:
            _, pending = self._pending.popitem()
            _end(pending, None, "UNAVAILABLE", self.why)


def _end(pending: _Pending, message: bytes | bytearray | None, code: str, details: str) -> None:
    """Call ``done`` of a request; an exception there must not keep other requests from their end."""
    try:
        pending.done(message, code, details)
    except Exception:
        _log.exception("the end of a request was lost")
