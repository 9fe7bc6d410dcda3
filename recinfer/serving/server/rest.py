"""The REST form of the Open Inference Protocol: JSON, and binary tensors behind the JSON, over HTTP/1.1 (aiohttp).

Binary tensors are the protocol's binary extension: the header ``Inference-Header-Content-Length`` says where the JSON ends,
and a tensor's parameter ``binary_data_size`` how many of the bytes behind it are its own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from recinfer.errors import InputError, OverloadedError
from recinfer.serving.engine.memory_budget import MemoryBudget, Ticket, ticket_of_task
from recinfer.serving.server import open_inference as oip
from recinfer.serving.server.http_site import HttpSite
from recinfer.serving.server.open_inference_grpc import OpenInference, off_loop, raw_array
from recinfer.serving.server.unpacking import TooLargeError, largest, unpack
from recinfer.serving.wire.json_codec import json_text, parse_json
from recinfer.serving.wire.status import status_of

__all__ = ["RestServer"]

_log = logging.getLogger(__name__)
_HEADER_LENGTH = "Inference-Header-Content-Length"
_BODY_S = 30.0  # a body that is not here by then is given up
_SENT_S = 30.0  # and so is an answer that its caller has not taken
_PARSED, _WRITTEN = 24, 24  # bytes of Python objects: for one of JSON that is read, for one of a tensor that is written
_MAX_NAME = 1024
_SHOWN = 80
_PATHS = (
    "/v2, /v2/health/live, /v2/health/ready, /live, /ready or /v2/models/MODEL[/versions/VERSION][/ready or /infer]"
)
_DIGITS = re.compile("[0-9]{1,19}")  # int() refuses thousands of them with an error of its own

_Observe = Callable[..., None]


class RestServer:
    """Serves the protocol on one port, on the event loop that ``start`` is awaited on.

    Args:
        answers: what answers.
        budget: of the bytes that requests and answers hold.
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        token: bearer token that every request but the health ones must carry; empty: none.
        tls: the server's TLS context; None: plain HTTP.
        reuse_port: share the port with other processes.
        grace: seconds that ``stop`` gives the requests that run.
        observe: told (call, gRPC code name, seconds, headers=..., num_bytes=...) of every request.
    """

    def __init__(
        self,
        answers: OpenInference,
        budget: MemoryBudget,
        host: str,
        port: int,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        grace: float = 10.0,
        observe: _Observe = lambda call, code, seconds, **more: None,
    ) -> None:
        self._answers, self._token, self._observe = answers, token.encode(), observe
        self.host, self.port, self._tls, self._reuse_port = host, port, tls, reuse_port
        self._grace, self._budget = grace, budget
        self._site: HttpSite | None = None

    async def start(self) -> None:
        """Bind and accept requests; raises OSError when the address cannot be bound."""
        app = web.Application(middlewares=[_in_json])
        model = "/v2/models/{model}"
        for path in (model, model + "/versions/{version}"):
            app.router.add_get(path, self._route("ModelMetadata", self._metadata))
            app.router.add_get(path + "/ready", self._route("ModelReady", self._model_ready, open_to_all=True))
            app.router.add_post(path + "/infer", self._route("ModelInfer", self._infer))
        app.router.add_get("/v2", self._route("ServerMetadata", self._server))
        for path in ("/live", "/v2/health/live"):
            app.router.add_get(path, self._route("ServerLive", self._live, open_to_all=True))
        for path in ("/ready", "/v2/health/ready"):
            app.router.add_get(path, self._route("ServerReady", self._ready, open_to_all=True))
        self._site = HttpSite(app, self.host, self.port, tls=self._tls, reuse_port=self._reuse_port, grace=self._grace)
        await self._site.start()
        self.port = self._site.port

    async def stop(self) -> None:
        """Take no new connections, let running requests end for up to ``grace`` seconds, close."""
        site, self._site = self._site, None
        if site is not None:
            await site.stop()

    def _route(
        self, call: str, work: Callable[[web.Request], Awaitable[web.Response]], *, open_to_all: bool = False
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            loop = asyncio.get_running_loop()
            start, code = loop.time(), "CANCELLED"
            try:
                if self._token and not open_to_all and not self._authorized(request):
                    code = "UNAUTHENTICATED"
                    text = "authorization: got no valid bearer token; send the header Authorization: Bearer TOKEN"
                    return web.json_response({"error": text}, status=401, headers={"WWW-Authenticate": "Bearer"})
                answer = await work(request)
                code = "OK"
                return answer
            except TooLargeError:
                code = "RESOURCE_EXHAUSTED"
                most = self._answers.limits.max_message_bytes
                text = f"body: got more than {most} bytes, expected at most that many"
                return web.json_response({"error": text}, status=413)
            except web.HTTPException:
                code = "UNIMPLEMENTED"
                raise
            except ConnectionError:  # the caller went away in the middle of the body; nobody reads this
                return web.Response(status=400)
            except Exception as error:
                status = status_of(error)
                code = status.code
                if code == "INTERNAL":
                    _log.exception("%s failed over HTTP", call)
                return web.json_response({"error": status.message}, status=status.http, headers=_when_again(error))
            finally:
                seconds = loop.time() - start
                self._observe(call, code, seconds, headers=request.headers, num_bytes=request.content_length or 0)

        return handle

    def _authorized(self, request: web.Request) -> bool:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        # Bytes that are no text are lone surrogates here.
        given = token.strip().encode(errors="surrogatepass")
        return kind.lower() == "bearer" and hmac.compare_digest(given, self._token)

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._answers.is_ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response(oip.server_metadata())

    async def _model_ready(self, request: web.Request) -> web.Response:
        name, version = _model_of(request)
        ready = self._answers.model_is_ready(name, version)
        return web.json_response({"name": name[:_MAX_NAME], "ready": ready}, status=200 if ready else 404)

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response(oip.model_metadata(self._answers.registry, *_model_of(request)))

    async def _infer(self, request: web.Request) -> web.Response:
        most, length = self._answers.limits.max_message_bytes, request.content_length or 0
        if length > most:
            raise TooLargeError
        ticket = self._budget.admit(length)
        ticket_of_task.set(ticket)
        try:
            answer = await self._answer(request, await self._body(request, most, ticket), ticket)
            await _send(request, answer)
            return answer
        finally:
            ticket.release()

    async def _body(self, request: web.Request, most: int, ticket: Ticket) -> bytearray:
        """The body, unpacked where it is compressed: once it is all here, so that nobody who sends slowly keeps others waiting."""
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in request.content.iter_any():
                    body += piece
                    if len(body) > most:
                        raise TooLargeError
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

    async def _answer(self, request: web.Request, body: bytearray, ticket: Ticket) -> web.Response:
        name, version = _model_of(request)
        header = request.headers.get(_HEADER_LENGTH)
        read, form = await off_loop(len(body), _read, body, header, name, version, ticket)
        answer = await self._answers.infer(read)
        head: dict[str, Any] = {
            "model_name": name,
            "model_version": answer.version,
            **({"id": read.id} if read.id else {}),
        }
        if answer.parameters:
            head["parameters"] = answer.parameters
        size = sum(len(output.data) for output in answer.outputs)
        return await off_loop(size, _write, head, answer.outputs, form, ticket)


async def _send(request: web.Request, answer: web.Response) -> None:
    """Write ``answer`` until the system has taken it, but for the 64 KiB that a connection may keep back.

    Raises:
        ConnectionError: the caller is gone, or does not read.
    """
    try:
        async with asyncio.timeout(_SENT_S):
            await answer.prepare(request)
            await answer.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError(f"the caller has not read its answer for {_SENT_S:g} s") from None


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """aiohttp's own errors in the form that the protocol has: clients read JSON, and fail on its text without showing it."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = " or ".join(sorted(error.allowed_methods))
        text = f"method: got {_short(request.method)} for path {_short(request.path)}, expected {allowed}"
        return web.json_response({"error": text}, status=error.status, headers={"Allow": error.headers["Allow"]})
    except web.HTTPNotFound as error:
        text = f"path: got {_short(request.path)}, expected {_PATHS}"
        return web.json_response({"error": text}, status=error.status)
    except web.HTTPError as error:
        return web.json_response({"error": error.text or error.reason}, status=error.status)


def _when_again(error: Exception) -> dict[str, str]:
    """The header that says after how many seconds, a whole number, another try makes sense."""
    return {"Retry-After": str(max(1, math.ceil(error.retry_after)))} if isinstance(error, OverloadedError) else {}


def _short(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def _model_of(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


def _read(
    body: bytearray, header: str | None, name: str, version: str, ticket: Ticket
) -> tuple[oip.InferRequest, Callable[[str], bool]]:
    """The request, and which of its outputs are wanted as binary."""
    length = len(body) if header is None else int(header) if _DIGITS.fullmatch(header) else -1
    if not 0 <= length <= len(body):
        raise InputError(
            f"{_HEADER_LENGTH}: got {str(header)[:40]!r}, expected 0 to {len(body)}, the bytes of the body"
        )
    ticket.grow(_PARSED * length)
    text = body if length == len(body) else body[:length]
    document = parse_json(text or b"{}")
    rest = memoryview(body)[length:]
    inputs = []
    for item in _list(document, "inputs"):
        tensor, rest = _input(item, rest)
        inputs.append(tensor)
    if len(rest):
        raise InputError(f"body: got {len(rest)} bytes behind the last binary tensor, expected none")
    parameters = _parameters(document)
    wanted = {_string(item, "name"): _parameters(item) for item in _list(document, "outputs")}
    everything = parameters.get("binary_data_output") is True
    binary = {key for key, given in wanted.items() if given.get("binary_data", everything) is True}
    method, request_id = parameters.get("method", ""), document.get("id", "")
    if not isinstance(method, str) or not isinstance(request_id, str):
        raise InputError("body: got an id or a parameter method that is no string")
    request = oip.InferRequest(name, version, request_id, inputs, list(wanted), method)
    ticket.resize(len(body) + sum(tensor.data.nbytes for tensor in inputs))
    return request, (lambda key: key in binary) if wanted else (lambda key: everything)


def _input(item: dict[str, Any], rest: memoryview) -> tuple[oip.InputTensor, memoryview]:
    name, datatype = _string(item, "name"), _string(item, "datatype")
    shape = item.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise InputError(f"input {name!r}: got no shape that is a list of integers")
    size = _parameters(item).get("binary_data_size")
    if size is None:
        return oip.InputTensor(name, datatype, tuple(shape), _array(name, datatype, item.get("data"))), rest
    if type(size) is not int or not 0 <= size <= len(rest) or "data" in item:
        raise InputError(f"input {name!r}: got binary_data_size {str(size)[:40]}, of which the body has {len(rest)}")
    return oip.InputTensor(name, datatype, tuple(shape), raw_array(name, datatype, rest[:size])), rest[size:]


def _array(name: str, datatype: str, data: Any) -> np.ndarray:
    dtype = oip.dtype_of(name, datatype)
    if not isinstance(data, list):
        raise InputError(f"input {name!r}: got no data, expected a list or the parameter binary_data_size")
    try:
        found = np.array(data).reshape(-1)
    except ValueError:
        found = np.array([None])
    if not found.size:
        return np.zeros(0, dtype)
    if found.dtype.kind not in ("fiu" if datatype == "FP32" else "i"):
        raise InputError(f"input {name!r}: got data that is not {datatype}, expected numbers in rows of one length")
    if datatype == "INT32" and not -(2**31) <= int(found.min()) <= int(found.max()) < 2**31:
        raise InputError(f"input {name!r}: got a number beyond INT32")
    with np.errstate(over="ignore"):  # what is beyond FP32 becomes infinite, which the predictor refuses
        return found.astype(dtype)


def _write(
    head: dict[str, Any], outputs: list[oip.OutputTensor], is_binary: Callable[[str], bool], ticket: Ticket
) -> web.Response:
    described, raw = [], []
    ticket.resize(sum((1 if is_binary(output.name) else 1 + _WRITTEN) * len(output.data) for output in outputs))
    for output in outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if is_binary(output.name):
            entry["parameters"] = {"binary_data_size": len(output.data)}
            raw.append(output.data)
        else:
            entry["data"] = np.frombuffer(output.data, oip.dtype_of(output.name, output.datatype)).tolist()
        described.append(entry)
    text = json_text({**head, "outputs": described}).encode()
    if not raw:
        ticket.resize(len(text))
        return web.Response(body=text, content_type="application/json")
    headers = {_HEADER_LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}
    ticket.grow(len(text) + sum(map(len, raw)))
    return web.Response(body=b"".join([text, *raw]), headers=headers)


def _list(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = document.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError(f"{key}: got something else than a list of objects")
    return items


def _parameters(item: dict[str, Any]) -> dict[str, Any]:
    parameters = item.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError("parameters: got something else than an object")
    return parameters


def _string(item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InputError(f"{key}: got {type(value).__name__}, expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{key}: got text with a lone surrogate, expected valid Unicode") from None
    return value
