"""One HTTP port for several protocols, with the checks of every call: the token, the memory budget, errors as JSON."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from recinfer.errors import InputError, OverloadedError
from recinfer.excerpts import quoted
from recinfer.serving.engine.memory_budget import MemoryBudget, Ticket, ticket_of_task
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.request import AnswerCall, served_of_task, trace_of_task
from recinfer.serving.server.api_docs.schemas import ModelSchemas, Schema
from recinfer.serving.server.compression import TooLargeError, largest, packed, unpack
from recinfer.serving.server.cors import Cors
from recinfer.serving.server.http_site import HttpSite
from recinfer.serving.server.telemetry.observe import REQUEST_ID, RequestIds
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.status import status_of
from recinfer.serving.wire.tracing import no_trace

__all__ = ["Described", "Get", "HttpProtocol", "HttpServer", "ModelProtocol", "Post", "Route", "count_json"]

_log = logging.getLogger(__name__)
_BODY_S = 30.0  # for a body to arrive whole
_SENT_S = 30.0  # for a client to read its answer
_PARSED = 24  # bytes of Python objects per byte of JSON

# The key of a request's id in the request itself; aiohttp before 3.13 has no typed keys, and later ones warn about others.
_ID: Any = web.RequestKey("id", str) if hasattr(web, "RequestKey") else "id"

_Observe = Callable[..., None]
_Work = Callable[[web.Request], Awaitable[web.Response]]


@dataclass(frozen=True)
class Described:
    """The description of a route in ``/openapi.json``. A path with ``{model}`` stands there once for each model.

    Attributes:
        tag: heading of the route.
        summary: one line; ``{model}`` in it becomes the model's name.
        operation: its id, behind the model's name and before the names of the path's other parameters.
        response: the schema of the answer, or its name among those that the protocol adds for a model.
        request: name of the body's schema; a model without an example of it lacks the route.
    """

    tag: str
    summary: str
    operation: str
    response: Schema | str
    request: str = ""


@dataclass(frozen=True)
class Get:
    """A path without a body.

    Attributes:
        path: pattern for aiohttp's router.
        call: name of the path's calls in metrics and the log.
        work: answers a request; an exception becomes an HTTP error of its status.
        is_open: no token is needed.
        for_people: a browser without the token shows its user a prompt for it.
        described: None: ``/openapi.json`` lacks the route.
    """

    method: ClassVar = "GET"

    path: str
    call: str
    work: _Work
    is_open: bool = False
    for_people: bool = False
    described: Described | None = None


@dataclass(frozen=True)
class Post:
    """A path with a body: ``work`` gets the body, read, unpacked and counted, with the call's ticket of the memory budget."""

    method: ClassVar = "POST"

    path: str
    call: str
    work: Callable[[web.Request, bytearray, Ticket], Awaitable[web.Response]]
    described: Described | None = None


Route = Get | Post


class HttpProtocol(Protocol):
    """The interface of a protocol on the port. The event loop calls it; long work goes to a thread (``off_loop``).

    Attributes:
        paths: the paths that exist, for the error at any other path.
    """

    paths: str

    def routes(self) -> Iterable[Route]:
        """The paths that the protocol answers."""
        ...


class ModelProtocol(HttpProtocol, Protocol):
    """A protocol for requests to the served models, as recinfer.serving.server.http_protocols lists them.

    Args:
        registry: the models.
        limits: bounds on requests.
        ask: answers a serialized request of ours; raises errors of ours.
        is_ready: whether the server can answer now.

    Attributes:
        about: of the protocol, for the first sentence of ``/openapi.json``; begins with its name.
    """

    about: str

    def __init__(
        self, registry: ModelRegistry, limits: Limits, ask: AnswerCall, is_ready: Callable[[], bool]
    ) -> None: ...

    def add_schemas(self, model: ServedModel, schemas: ModelSchemas) -> None:
        """Add the schemas and examples that the descriptions of the routes name, as they are for ``model``."""
        ...


class HttpServer:
    """Serves protocols on one port, on the event loop that ``start`` is awaited on.

    Args:
        protocols: the protocols that answer.
        budget: memory budget of requests and answers.
        most_bytes: largest size of a body.
        host: address to listen on.
        port: TCP port; 0 takes a free port.
        allows: whether a request with this ``Authorization: Bearer`` header may pass; open paths need no header. A browser,
            which prompts its user for a name and a password, passes with the token as the password.
        tls: the server's TLS context; None: plain HTTP.
        needs_certificate: requests need a client certificate, which ``tls`` has checked if there is one; open paths need none.
        reuse_port: share the port with other processes.
        idle_s: seconds after which a connection without a request is closed; None: 75.
        cors: which pages of other origins may send requests.
        observe: called with (call, gRPC code name, seconds, headers=..., num_bytes=..., served=..., trace=...) of every request.
        begin: called with (call, headers) of every request; returns its trace or None.
    """

    def __init__(
        self,
        protocols: Sequence[HttpProtocol],
        budget: MemoryBudget,
        most_bytes: int,
        host: str,
        port: int,
        *,
        allows: Callable[[str | None], bool] = lambda authorization: True,
        tls: ssl.SSLContext | None = None,
        needs_certificate: bool = False,
        reuse_port: bool = False,
        idle_s: float | None = None,
        cors: Cors | None = None,
        observe: _Observe = lambda call, code, seconds, **more: None,
        begin: Callable[[str, Any], Any] = lambda call, headers: None,
    ) -> None:
        self._protocols = protocols
        self._allows = allows
        self._observe, self._begin = observe, begin
        self.host = host
        self.port = port
        self._tls = tls
        self._needs_certificate = needs_certificate
        self._reuse_port = reuse_port
        self._idle_s = idle_s
        self._cors = cors or Cors()
        self._ids = RequestIds()
        self._budget = budget
        self._most_bytes = most_bytes
        self._site: HttpSite | None = None
        self._takes_posts: list[str] = []

    async def start(self) -> None:
        """Bind and accept requests; raises OSError when the address cannot be bound."""
        app = web.Application(middlewares=[self._in_json])
        app.on_response_prepare.append(self._add_headers)
        routes = [route for protocol in self._protocols for route in protocol.routes()]
        posts = (route.path for route in routes if isinstance(route, Post))
        self._takes_posts = [path.replace("{model}", "MODEL") for path in posts if path.count("{") == 1]
        for route in routes:
            app.router.add_route(route.method, route.path, self._handler(route), expect_handler=self._expected)
            if isinstance(route, Get):
                app.router.add_route("HEAD", route.path, self._handler(route), expect_handler=self._expected)
        self._site = HttpSite(
            app,
            self.host,
            self.port,
            tls=self._tls,
            reuse_port=self._reuse_port,
            **({} if self._idle_s is None else {"idle_s": self._idle_s}),
            refused=self._unreadable,
        )
        await self._site.start()
        self.port = self._site.port

    async def stop(self, grace: float = 1.0) -> None:
        """Take no new connections, let running requests end for up to ``grace`` seconds, close."""
        site, self._site = self._site, None
        if site is not None:
            await site.stop(grace)

    def _unreadable(self, status: int, why: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Count and log a request that no route sees; returns headers of its answer."""
        identified = {REQUEST_ID: self._ids.of(headers.get(REQUEST_ID))}
        _log.info("a request over HTTP was refused with %d: %s", status, why)
        self._observe("Http", "INTERNAL" if status >= 500 else "INVALID_ARGUMENT", 0.0, headers=identified)
        return identified

    def _id_of(self, request: web.Request) -> str:
        found: str | None = request.get(_ID)
        if found is None:
            found = request[_ID] = self._ids.of(request.headers.get(REQUEST_ID))
        return found

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers of every answer, also of errors."""
        response.headers[REQUEST_ID] = self._id_of(request)
        for name, value in self._cors.headers(request.headers.get("Origin")).items():
            response.headers.add(name, value)

    async def _expected(self, request: web.Request) -> web.StreamResponse | None:
        """Answer the header Expect: ``100-continue`` with 100 Continue, any other value with an error."""
        expected = request.headers.get("Expect", "")
        if expected.lower() != "100-continue":
            why = f"Expect: got {quoted(expected)}, expected 100-continue, or no such header"
            return web.json_response({"error": why}, status=417, headers=self._unreadable(417, why, request.headers))
        if request.version == HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # a handler's error would otherwise count as one in the middle of an answer
        return None

    def _handler(self, route: Route) -> _Work:
        call, is_open = route.call, isinstance(route, Get) and route.is_open
        scheme = 'Basic realm="recinfer: the token as the password", charset="UTF-8"'
        scheme = scheme if isinstance(route, Get) and route.for_people else "Bearer"
        work = self._sent(route) if isinstance(route, Get) else self._with_body(route)

        async def handle(request: web.Request) -> web.Response:
            loop = asyncio.get_running_loop()
            start, code = loop.time(), "CANCELLED"
            served_of_task.set(None)
            headers = partial(self._identified, request)
            trace = self._begin(call, headers)
            trace_of_task.set(trace or no_trace)
            try:
                if not is_open and self._needs_certificate and not request.get_extra_info("peercert"):
                    code = "UNAUTHENTICATED"
                    text = "TLS: got no client certificate, expected one of an authority that this server trusts"
                    return web.json_response({"error": text}, status=401, headers={"WWW-Authenticate": scheme})
                if not is_open and not self._allows(_as_bearer(request.headers.get("Authorization"))):
                    code = "UNAUTHENTICATED"
                    text = "authorization: got no valid bearer token; send the header Authorization: Bearer TOKEN"
                    return web.json_response({"error": text}, status=401, headers={"WWW-Authenticate": scheme})
                answer = await work(request)
                code = "OK"
                return answer
            except TooLargeError as error:
                code = "RESOURCE_EXHAUSTED"
                return web.json_response({"error": str(error)}, status=413)
            except web.HTTPException:
                code = "UNIMPLEMENTED"
                raise
            except ConnectionError:  # the caller closed the connection in the middle of the body
                return web.Response(status=400)
            except Exception as error:
                status = status_of(error)
                code = status.code
                if code == "INTERNAL":
                    _log.exception("%s failed over HTTP", call)
                return web.json_response({"error": status.message}, status=status.http, headers=_retry_after(error))
            finally:
                seconds, served, size = loop.time() - start, served_of_task.get(), request.content_length or 0
                self._observe(call, code, seconds, headers=headers, num_bytes=size, served=served, trace=trace)

        return handle

    def _identified(self, request: web.Request) -> dict[str, str]:
        return {**request.headers, REQUEST_ID: self._id_of(request)}

    def _sent(self, route: Get) -> _Work:
        if route.is_open:
            return route.work  # the answer has a few bytes, and is sent also while the budget is full

        async def answered(request: web.Request) -> web.Response:
            answer = await route.work(request)
            assert isinstance(answer.body, bytes)
            ticket = self._budget.admit(len(answer.body))
            try:
                return await _send(request, await packed(request, answer, ticket))
            finally:
                ticket.release()

        return answered

    def _with_body(self, route: Post) -> _Work:
        work, most = route.work, self._most_bytes

        async def answered(request: web.Request) -> web.Response:
            length = request.content_length or 0
            if length > most:
                raise _too_large(most)
            ticket = self._budget.admit(length)
            ticket_of_task.set(ticket)
            try:
                answer = await work(request, await _body(request, most, ticket), ticket)
                return await _send(request, await packed(request, answer, ticket))
            finally:
                ticket.release()

        return answered

    @web.middleware
    async def _in_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert aiohttp's own errors to JSON: clients read JSON, and would fail on plain text without showing it."""
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            if self._cors.is_preflight(request):
                return self._cors.preflight(request, error.allowed_methods)
            allowed = " or ".join(sorted(error.allowed_methods))
            text = f"method: got {quoted(request.method)} for path {quoted(request.path)}, expected {allowed}"
            # A model's name may have a colon, so that any verb fits the path of a model's status.
            if request.method == "POST":
                text += f", or POST to {' or '.join(self._takes_posts)}"
            return web.json_response({"error": text}, status=error.status, headers={"Allow": error.headers["Allow"]})
        except web.HTTPNotFound as error:
            text = f"path: got {quoted(request.path)}, expected {', '.join(p.paths for p in self._protocols)}"
            return web.json_response({"error": text}, status=error.status)
        except web.HTTPError as error:
            return web.json_response({"error": error.text or error.reason}, status=error.status)


def count_json(ticket: Ticket, num_bytes: int) -> None:
    """Count the Python objects that ``num_bytes`` bytes of JSON become; call this before the JSON is parsed.

    Raises:
        TooLargeError: the objects exceed the whole budget. Parsing would also delay other calls, by half a second and more.
        OverloadedError: the objects exceed the free part of the budget.
    """
    most = ticket.budget_bytes // (1 + _PARSED)
    if num_bytes > most:
        raise TooLargeError(
            f"body: got {num_bytes} bytes of JSON, expected at most {most}: they become {_PARSED} times as many when they are "
            "read, and the server has a memory budget (--memory-budget-mib); send fewer samples per request, or use gRPC"
        )
    ticket.grow(_PARSED * num_bytes)


def _too_large(most: int) -> TooLargeError:
    return TooLargeError(f"body: got more than {most} bytes, expected at most that many")


async def _body(request: web.Request, most: int, ticket: Ticket) -> bytearray:
    """Read the body. A compressed body is unpacked when it has arrived whole, so that a slow client does not delay others."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most:
                    raise _too_large(most)
                if len(body) > ticket.held:
                    ticket.resize(len(body))
    except TimeoutError:
        raise InputError(f"body: not complete after {_BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        why = " ".join(str(error).split())
        raise InputError(f"body: cannot be read ({why}), expected one as its chunks say") from None
    encoding = ", ".join(request.headers.getall("Content-Encoding", [])).strip().lower()
    if encoding in ("", "identity"):
        return body
    ticket.grow(largest(len(body), most))
    unpacked = await asyncio.to_thread(unpack, body, encoding, most)
    ticket.resize(len(unpacked))
    return unpacked


async def _send(request: web.Request, answer: web.Response) -> web.Response:
    """Write ``answer`` until the system has taken all but the 64 KiB that a connection may buffer; returns it.

    Raises:
        ConnectionError: the client has disconnected, or does not read.
    """
    try:
        async with asyncio.timeout(_SENT_S):
            await answer.prepare(request)
            await answer.write_eof()
            return answer
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError(f"the caller has not read its answer for {_SENT_S:g} s") from None


def _as_bearer(header: str | None) -> str | None:
    """``header``; for a header with a name and a password, the bearer header of the password; None if it is malformed."""
    kind, _, value = (header or "").partition(" ")
    if kind.lower() != "basic":
        return header
    try:
        return "Bearer " + base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no text in it
        return None


def _retry_after(error: Exception) -> dict[str, str]:
    """The header Retry-After, in whole seconds, for an OverloadedError; no header for other errors."""
    return {"Retry-After": str(max(1, math.ceil(error.retry_after)))} if isinstance(error, OverloadedError) else {}
