"""Listens for HTTP on one port, for an aiohttp application; connections that send or read nothing are closed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from recinfer.errors import UnavailableError
from recinfer.serving.wire.address import listening_socket

__all__ = ["MOST_HEADS_BYTES", "MOST_HEAD_BYTES", "HttpSite"]

_log = logging.getLogger(__name__)
_HEADER_S = 10.0
_IDLE_S = 75.0
_BACKLOG = 512
_LINGER_S, _LOOK_S = 0.5, 0.02  # for connections between two requests at a stop
_CANCELLED_S = 0.1  # for requests that have not ended by then
MOST_HEAD_BYTES = 32 << 10
"""Largest size of the path with its query, and of each header's value: long cookies and tokens are 10 to 15 KB."""
MOST_HEADS_BYTES = 4 * MOST_HEAD_BYTES
"""Largest size of all of a request's header: the memory budget does not count it, as no call has a ticket before."""
_HEAD_END = b"\r\n\r\n"
_QUOTED = re.compile(r":?\s*(bytearray\()?b['\"].*", re.DOTALL)  # the bytes at fault, with which aiohttp's texts end


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether to log a record; False for a message that is not HTTP, of which aiohttp would log a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


_log.addFilter(_is_worth_a_line)


class HttpSite:
    """A listening port, on the event loop on which ``start`` is awaited.

    aiohttp waits without a limit for a request's header, and for the client to read its answer. This site closes a connection
    without a complete header ``header_s`` after its opening, and a connection without traffic for ``idle_s`` and ``header_s``
    after an answer. Compressed bodies reach the application as they were sent.

    Args:
        app: the application that answers; gets a middleware.
        host: address to listen on.
        port: TCP port; 0 takes a free port.
        tls: the server's TLS context; None: plain HTTP.
        reuse_port: share the port with other processes.
        refused: called with HTTP status, reason and headers for a request that cannot be read, which no handler sees; returns
            the headers to answer with.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        header_s: float = _HEADER_S,
        idle_s: float = _IDLE_S,
        refused: Callable[[int, str, Mapping[str, str]], Mapping[str, str]] = lambda status, why, headers: {},
    ) -> None:
        self._app = app
        self.host = host
        self.port = port
        self._tls = tls
        self._reuse_port = reuse_port
        self._header_s = header_s
        self._idle_s = idle_s
        self._timers: dict[Any, asyncio.TimerHandle] = {}
        # By connection that waits for a header: the bytes of it so far, and the last of them.
        self._heads: dict[Any, tuple[int, bytes]] = {}
        self._stops = False
        self._refused = refused
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and accept requests; raises UnavailableError when the address cannot be bound."""
        self._app.middlewares.append(self._watch)
        self._app.on_response_prepare.append(self._say_close)
        # No access log: the server's own log writes a line for each request, with the request's id.
        runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=_log,
            handle_signals=False,
            keepalive_timeout=self._idle_s,
            shutdown_timeout=_CANCELLED_S,
            handler_cancellation=True,  # a caller that disconnects frees its place in the queue
            auto_decompress=False,  # aiohttp would unpack bodies on the event loop, without a limit
            max_line_size=MOST_HEAD_BYTES,
            max_field_size=MOST_HEAD_BYTES,
        )
        await runner.setup()
        self._runner, loop = runner, asyncio.get_running_loop()

        site = self

        class WithJsonErrors(RequestHandler):  # aiohttp makes the handlers itself, and takes no class for them
            __slots__ = ()

            def data_received(self, data: bytes) -> None:
                if site._has_room(self, data):
                    super().data_received(data)

            def connection_lost(self, exc: BaseException | None) -> None:
                site._heads.pop(self, None)
                super().connection_lost(exc)

            def handle_error(self, *args: Any, **more: Any) -> web.StreamResponse:
                return site._unreadable(*args, **more)

            async def finish_response(
                self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
            ) -> tuple[web.StreamResponse, bool]:
                # aiohttp answers requests with the header Expect for an unknown path before the application gets them.
                if isinstance(resp, web.HTTPError):
                    resp = site._unreadable(request, resp.status, None, resp.text or resp.reason)
                return await super().finish_response(request, resp, start_time)

        def connected() -> asyncio.Protocol:
            assert runner.server is not None
            handler = runner.server()
            handler.__class__ = WithJsonErrors
            self._close_in(self._header_s, handler)
            self._heads[handler] = 0, b""
            return handler

        try:
            self._listener = await loop.create_server(
                connected,
                sock=listening_socket(self.host, self.port, share_port=self._reuse_port),
                ssl=self._tls,
                ssl_handshake_timeout=self._header_s if self._tls is not None else None,
                backlog=_BACKLOG,
            )
        except (UnavailableError, OSError):
            await self.stop(0.0)
            raise
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self, grace: float) -> None:
        """Accept no new connections, wait up to ``grace`` seconds for running requests, close.

        Answers say ``Connection: close`` from now on. A connection that is open between two requests stays open for a moment,
        since its client may be sending the next request.
        """
        self._stops = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self._runner is not None and self._runner.server is not None:
            loop = asyncio.get_running_loop()
            server, now = self._runner.server, loop.time()
            end = now + grace
            while server.connections and loop.time() < min(end, now + _LINGER_S):
                await asyncio.sleep(_LOOK_S)
            server.pre_shutdown()
            # aiohttp waits for the end of a request, and once more as long for that of a request that has not ended.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await server.shutdown(grace)
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def _say_close(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._stops:
            response.force_close()
            response.headers["Connection"] = "close"

    def _unreadable(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer in JSON to a request that aiohttp cannot read, see its RequestHandler.handle_error."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: no other can be sent")
        # The text leaves out the received bytes, since it is logged and they may be a header with a token.
        why = " ".join(_QUOTED.sub("", message or "").split()) or "the server failed"
        if status == 500:
            _log.error("a request over HTTP failed", exc_info=exc)
            why = "internal error; the server's log has the details"
        elif "more than" in why:  # aiohttp's text for a line that is too long
            status, why = 431, f"a header or the path is too long, expected at most {MOST_HEAD_BYTES} bytes each"
        elif "PRI/Upgrade" in why:  # aiohttp's text for the first bytes of HTTP/2
            why = "request: got HTTP/2, expected HTTP/1.1; gRPC calls go to the port of --port"
        elif "HTTPS traffic" in why:
            why = "request: got TLS (https), expected plain HTTP, as the server has no certificate"
        elif isinstance(exc, HttpProcessingError):
            why = f"request: got what is not HTTP/1.1 ({why[:200]}), expected a request such as GET /v2/health/live HTTP/1.1"
        headers = self._refused(status, why[:300], request.headers)
        answer = web.json_response({"error": why[:300]}, status=status, headers=headers)
        answer.force_close()
        return answer

    def _has_room(self, connection: Any, data: bytes) -> bool:
        """Count bytes of a header; answers a connection whose header is too large, and returns False from then on."""
        if connection not in self._heads:
            return True
        size, last = self._heads[connection]
        if size > MOST_HEADS_BYTES:  # answered: what the client still sends is dropped until it has read that
            return False
        end = (last + data).find(_HEAD_END)
        size += len(data) if end < 0 else end - len(last)
        self._heads[connection] = size, (last + data)[-len(_HEAD_END) :]
        if size <= MOST_HEADS_BYTES:
            if end >= 0:  # a body has bounds of its own
                del self._heads[connection]
            return True
        why = f"the header is too long, expected at most {MOST_HEADS_BYTES} bytes in all"
        body = json.dumps({"error": why}).encode()
        lines = {
            "Content-Type": "application/json; charset=utf-8",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines |= self._refused(431, why, {})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        connection.transport.write(f"HTTP/1.1 431 Request Header Fields Too Large\r\n{head}\r\n".encode() + body)
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()
        self._close_in(_LINGER_S, connection)
        return False

    def _close_in(self, seconds: float, connection: Any) -> None:
        def close() -> None:
            self._timers.pop(connection, None)
            connection.force_close()

        self._timers[connection] = asyncio.get_running_loop().call_later(seconds, close)

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # The header is complete: from here on the application has its own timeouts.
        if (timer := self._timers.pop(request.protocol, None)) is not None:
            timer.cancel()
        self._heads.pop(request.protocol, None)
        try:
            return await handler(request)
        finally:
            if request.transport is not None:
                self._close_in(self._idle_s + self._header_s, request.protocol)
                if request.content.is_eof():  # otherwise aiohttp reads the rest of the body, and closes
                    self._heads[request.protocol] = 0, b""
