"""The paths of the V1 protocol."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web

from recinfer.errors import NotFoundError
from recinfer.serving.engine.memory_budget import Ticket
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.request import AnswerCall, CallName, served_of_task
from recinfer.serving.server.api_docs.schemas import ModelSchemas, array_of, open_object
from recinfer.serving.server.http_server import Described, Get, Post, Route, count_json
from recinfer.serving.server.v1.answers import metadata, status, to_json
from recinfer.serving.server.v1.requests import ConvertedRequest, to_message
from recinfer.serving.server.v1.schemas import add_schemas
from recinfer.serving.wire.json_codec import parse_json
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.loop import off_loop

__all__ = ["V1"]

_WRITTEN = 24  # bytes of Python objects and text for one of a vector
_described = partial(Described, "V1: rows and columns")
_MODELS = _described("The models", "v1Models", open_object({"models": array_of({"type": "string"}, None)}, ["models"]))
_PREDICT = _described("Score samples with {model}", "v1Predict", "PredictResponse", "PredictRequest")
_LOOKUP = _described("Embeddings of ids, by {model}", "v1Lookup", "LookupResponse", "LookupRequest")
_STATUS = _described(
    "Versions of {model} and their state", "status", {"type": "object", "required": ["model_version_status"]}
)
_METADATA = _described("Inputs and outputs of {model}", "metadata", {"type": "object"})


class V1:
    """The protocol on a port. See recinfer.serving.server.http_server.ModelProtocol."""

    about = "**V1** is TensorFlow Serving's and KServe's REST API (JSON rows or columns)"
    paths = "/v1/models/MODEL[/versions/VERSION or /labels/LABEL][:predict, :lookup or /metadata]"

    def __init__(self, registry: ModelRegistry, limits: Limits, ask: AnswerCall, is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._limits = limits
        self._ask = ask
        self._is_ready = is_ready

    def routes(self) -> list[Route]:
        """Every path of the protocol."""
        found: list[Route] = [Get("/v1/models", "V1Models", self._models, described=_MODELS)]
        for where in ("", "/versions/{version}", "/labels/{label}"):
            path = "/v1/models/{model}" + where
            # The router takes the first path that fits, and a model's name may have a colon.
            found += [
                Post(path + ":predict", "V1Predict", partial(self._answer, "Predict"), _PREDICT),
                Post(path + ":lookup", "V1Lookup", partial(self._answer, "Lookup"), _LOOKUP),
                Get(path + "/metadata", "V1Metadata", self._metadata, described=_METADATA),
                Get(path, "V1Status", self._status, described=_STATUS),
            ]
        return found

    def add_schemas(self, model: ServedModel, schemas: ModelSchemas) -> None:
        """Add the schemas of a prediction and a lookup."""
        add_schemas(model, self._limits, schemas)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"models": self._registry.names()})

    async def _status(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(status(self._registry, *self._model_and_version(request), self._is_ready()))
        except NotFoundError:
            if request.path.endswith((":predict", ":lookup")):
                raise web.HTTPMethodNotAllowed(request.method, ["POST"]) from None
            raise

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response(metadata(self._choose(*self._model_and_version(request))))

    async def _answer(self, call: CallName, request: web.Request, body: bytearray, ticket: Ticket) -> web.Response:
        name, version = self._model_and_version(request)
        model = self._choose(name, version)
        count_json(ticket, len(body))
        asked = await off_loop(len(body), self._read, body, call, model)
        ticket.resize(len(body) + len(asked.message))
        try:
            answer = await self._ask(call, asked.message)
        except NotFoundError:
            if version:
                raise
            # The chosen version may be unloaded by now; the second try chooses another.
            asked = await off_loop(len(body), self._read, body, call, self._choose(name, ""))
            answer = await self._ask(call, asked.message)
        ticket.resize((1 + _WRITTEN) * len(answer))
        text = await off_loop(len(answer), to_json, call, answer, asked.in_rows)
        ticket.resize(len(text))
        return web.Response(body=text, content_type="application/json")

    def _choose(self, name: str, version: str) -> ServedModel:
        """Choose the version for a call and count the call for it; raises NotFoundError."""
        model = self._registry.get(name, version)
        served_of_task.set(model)
        return model

    def _read(self, body: bytearray, call: CallName, model: ServedModel) -> ConvertedRequest:
        return to_message(parse_json(body), call, model, self._limits)

    def _model_and_version(self, request: web.Request) -> tuple[str, str]:
        """The model and version of a path; an empty version where the path names none."""
        found = request.match_info
        name = found["model"]
        if "label" in found:
            return name, self._registry.resolve_label(name, found["label"])
        return name, found.get("version", "")
