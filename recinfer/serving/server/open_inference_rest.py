"""The REST form of the Open Inference Protocol: JSON, and binary tensors behind the JSON, over HTTP/1.1 (aiohttp).

Binary tensors are the protocol's binary extension: the header ``Inference-Header-Content-Length`` says where the JSON ends,
and a tensor's parameter ``binary_data_size`` how many of the following bytes belong to the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from aiohttp import web

from recinfer.columns import Strings, strings_of
from recinfer.errors import InputError
from recinfer.serving.engine.memory_budget import Ticket
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.request import AnswerCall
from recinfer.serving.server import open_inference as oip
from recinfer.serving.server.api_docs.schemas import ModelSchemas, Schema, array_of, open_object
from recinfer.serving.server.http_server import Described, Get, Post, Route, count_json
from recinfer.serving.server.open_inference_described import add_schemas, model_metadata, server_metadata
from recinfer.serving.server.open_inference_grpc import OpenInference, raw_tensor
from recinfer.serving.wire.arrays import Buffer
from recinfer.serving.wire.json_codec import (
    json_pieces,
    json_text,
    parse_json,
    real_numbers,
    text_of,
    valid_text,
    whole_numbers,
)
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.loop import off_loop

__all__ = ["OpenInferenceRest"]

_HEADER_LENGTH = "Inference-Header-Content-Length"
_WRITTEN = 24  # bytes of Python objects and text per byte of a tensor
_MAX_NAME = 1024
_DIGITS = re.compile("[0-9]{1,19}")  # int() refuses thousands of them with an error of its own
_TAG, _HEALTH = "V2: Open Inference Protocol", "health"
_TEXT: Schema = {"type": "string"}
_SERVER = Described(
    _TAG,
    "The server's name and version",
    "v2Server",
    open_object({"name": _TEXT, "version": _TEXT, "extensions": array_of(_TEXT, None)}, ["name", "version"]),
)
_LIVE, _READY = (
    Described(_HEALTH, f"Whether the server is {key}", f"health_{key}", open_object({key: {"type": "boolean"}}, [key]))
    for key in ("live", "ready")
)
_METADATA = Described(_TAG, "Inputs and outputs of {model}", "v2Metadata", {"type": "object"})
_MODEL_READY = Described(_HEALTH, "Whether {model} takes requests", "ready", {"type": "object"})
_INFER = Described(_TAG, "Ask {model} by tensors", "infer", "InferResponse", "InferRequest")


class OpenInferenceRest:
    """The protocol's paths. See recinfer.serving.server.http_server.ModelProtocol."""

    about = "**V2** the Open Inference Protocol (tensors,\nalso binary)"
    paths = "/v2, /v2/health/live, /v2/health/ready, /v2/models/MODEL[/versions/VERSION][/ready or /infer]"

    def __init__(self, registry: ModelRegistry, limits: Limits, ask: AnswerCall, is_ready: Callable[[], bool]) -> None:
        self._answers = OpenInference(registry, limits, ask, is_ready)

    def routes(self) -> list[Route]:
        """Every path of the protocol."""
        found: list[Route] = [
            Get("/v2", "ServerMetadata", self._server, described=_SERVER),
            Get("/v2/health/live", "ServerLive", self._live, is_open=True, described=_LIVE),
            Get("/v2/health/ready", "ServerReady", self._ready, is_open=True, described=_READY),
            Get("/live", "ServerLive", self._live, is_open=True),
            Get("/ready", "ServerReady", self._ready, is_open=True),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found += [
                Get(path, "ModelMetadata", self._metadata, described=_METADATA),
                Get(path + "/ready", "ModelReady", self._model_ready, is_open=True, described=_MODEL_READY),
                Post(path + "/infer", "ModelInfer", self._infer, _INFER),
            ]
        return found

    def add_schemas(self, model: ServedModel, schemas: ModelSchemas) -> None:
        """Add the schemas of a ModelInfer."""
        add_schemas(model, self._answers.registry, schemas)

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._answers.is_ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response(server_metadata())

    async def _model_ready(self, request: web.Request) -> web.Response:
        name, version = _model_of(request)
        ready = self._answers.model_is_ready(name, version)
        return web.json_response({"name": name[:_MAX_NAME], "ready": ready}, status=200 if ready else 404)

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response(model_metadata(self._answers.choose(*_model_of(request)), self._answers.registry))

    async def _infer(self, request: web.Request, body: bytearray, ticket: Ticket) -> web.Response:
        name, version = _model_of(request)
        model = self._answers.choose(name, version)
        header = request.headers.get(_HEADER_LENGTH)
        read, form = await off_loop(len(body), _read, body, header, name, version, ticket)
        answer = await self._answers.infer(read, model)
        head: dict[str, Any] = {
            "model_name": name,
            "model_version": answer.version,
            **({"id": read.id} if read.id else {}),
        }
        if answer.parameters:
            head["parameters"] = answer.parameters
        size = sum(len(output.data) for output in answer.outputs)
        return await off_loop(size, _write, head, answer.outputs, form, ticket)


def _model_of(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


def _read(
    body: bytearray, header: str | None, name: str, version: str, ticket: Ticket
) -> tuple[oip.InferRequest, Callable[[str], bool]]:
    """The request, and a function that says of an output's name whether the output is wanted as binary data."""
    length = len(body) if header is None else int(header) if _DIGITS.fullmatch(header) else -1
    if not 0 <= length <= len(body):
        raise InputError(
            f"{_HEADER_LENGTH}: got {str(header)[:40]!r}, expected 0 to {len(body)}, the bytes of the body"
        )
    count_json(ticket, length)
    text = body if length == len(body) else body[:length]
    document = parse_json(text or b"{}")
    rest = memoryview(body)[length:]
    inputs = []
    for number, item in enumerate(_list(document, "inputs")):
        tensor, rest = _input(f"inputs[{number}]", item, rest)
        inputs.append(tensor)
    if len(rest):
        raise InputError(f"body: got {len(rest)} bytes behind the last binary tensor, expected none")
    parameters = _parameters("", document)
    wanted = {}
    for number, item in enumerate(_list(document, "outputs")):
        output = _string(f"outputs[{number}]", item, "name")
        wanted[output] = _parameters(f"output {output!r}", item)
    everything = parameters.get("binary_data_output") is True
    binary = {key for key, given in wanted.items() if given.get("binary_data", everything) is True}
    method, request_id = parameters.get("method", ""), document.get("id", "")
    if not isinstance(request_id, str):
        raise InputError(f"id: got {text_of(request_id)}, expected a string")
    request = oip.InferRequest(name, version, request_id, inputs, list(wanted), method)
    ticket.resize(len(body) + sum(tensor.num_bytes for tensor in inputs))
    return request, (lambda key: key in binary) if wanted else (lambda key: everything)


def _input(place: str, item: dict[str, Any], rest: memoryview) -> tuple[oip.InputTensor, memoryview]:
    name, datatype = _string(place, item, "name"), _string(place, item, "datatype")
    shape = item.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise InputError(f"input {name!r}: got the shape {text_of(shape)}, expected a list of integers")
    size = _parameters(f"input {name!r}", item).get("binary_data_size")
    if size is None:
        data = item.get("data")
        if datatype == oip.BYTES:
            return oip.string_tensor(name, tuple(shape), _strings(name, data)), rest
        return oip.InputTensor(name, datatype, tuple(shape), _array(name, datatype, data)), rest
    if not 0 <= size <= len(rest) or "data" in item:
        raise InputError(f"input {name!r}: got binary_data_size {str(size)[:40]}, of which the body has {len(rest)}")
    return raw_tensor(name, datatype, tuple(shape), rest[:size]), rest[size:]


def _strings(name: str, data: Any) -> Strings:
    flat = _flat(name, oip.BYTES, data)
    if odd := [(at, value) for at, value in enumerate(flat) if type(value) is not str]:
        at, value = odd[0]
        raise InputError(f"input {name!r}: got {text_of(value)} at position {at} of data, expected a string of BYTES")
    return strings_of(f"input {name!r}", flat)


def _flat(name: str, datatype: str, data: Any) -> list[Any]:
    if not isinstance(data, list):
        got = "no data" if data is None else f"the data {text_of(data)}"
        raise InputError(f"input {name!r}: got {got}, expected a list, or the parameter binary_data_size")
    flat = data
    while flat and set(map(type, flat)) == {list}:  # rows: the shape says how many
        if len(set(map(len, flat))) > 1:
            raise InputError(
                f"input {name!r}: got rows of different length, expected numbers of {datatype} in rows of one"
            )
        flat = list(chain.from_iterable(flat))
    return flat


def _array(name: str, datatype: str, data: Any) -> np.ndarray:
    dtype = oip.dtype_of(name, datatype)
    flat = _flat(name, datatype, data)
    if datatype == "BF16":
        raise InputError(f"input {name!r}: got BF16 as JSON, expected binary data, or FP32")
    if datatype == "BOOL":
        flat = [int(value) if type(value) is bool else value for value in flat]
    alone = partial(real_numbers, dtype=dtype) if dtype.kind == "f" else partial(whole_numbers, dtype=dtype)
    found = alone(flat)
    if found is None:
        at = next(at for at, value in enumerate(flat) if alone([value]) is None)
        raise InputError(
            f"input {name!r}: got {text_of(flat[at])} at position {at} of data, expected a number of {datatype}"
        )
    return found


def _write(
    head: dict[str, Any], outputs: list[oip.OutputTensor], is_binary: Callable[[str], bool], ticket: Ticket
) -> web.Response:
    described: list[str] = []
    raw: list[Buffer] = []
    ticket.resize(sum((1 if is_binary(output.name) else 1 + _WRITTEN) * len(output.data) for output in outputs))
    for output in outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if is_binary(output.name):
            entry["parameters"] = {"binary_data_size": len(output.data)}
            raw.append(output.data)
            described.append(json_text(entry))
        else:
            values = np.frombuffer(output.data, oip.dtype_of(output.name, output.datatype))
            texts = [json_text(values[piece].tolist())[1:-1] for piece in json_pieces(values.size, values.size)]
            described.append(f'{json_text(entry)[:-1]}, "data": [{", ".join(texts)}]}}')
    text = f'{json_text(head)[:-1]}, "outputs": [{", ".join(described)}]}}'.encode()
    if not raw:
        ticket.resize(len(text))
        return web.Response(body=text, content_type="application/json")
    headers = {_HEADER_LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}
    ticket.grow(len(text) + sum(map(len, raw)))
    return web.Response(body=b"".join([text, *raw]), headers=headers)


def _list(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = document.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError(f"{key}: got {text_of(items)}, expected a list of objects")
    return items


def _parameters(place: str, item: dict[str, Any]) -> dict[str, Any]:
    parameters = item.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError(f"parameters: got {text_of(parameters)}, expected an object")
    oip.check_parameters(place, parameters)
    return parameters


def _string(place: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        got = text_of(value) if key in item else "none"
        raise InputError(f"{place}.{key}: got {got}, expected a string")
    return valid_text(key, value)
