"""The OpenAPI 3.1 document of a server: the routes of its protocols, for the models that it serves at this moment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.api_docs.schemas import ModelSchemas, Schema, open_object
from recinfer.serving.server.http_server import ModelProtocol, Post, Route
from recinfer.serving.wire.limits import Limits
from recinfer.version import __version__

__all__ = ["document"]

_ABOUT = """Predictions and embedding lookups of recommendation models, by {number} protocols on this port:
{protocols}. A request may take {bytes} bytes, {batch} samples and {ids} ids."""
_NUMBERS = {2: "two", 3: "three", 4: "four"}
_MODEL = "{model}"  # in the path and the summary of a route that each model has
_PARAMETER = re.compile(r"\{(\w+)\}")
_NO_NAME = re.compile("[^A-Za-z0-9._-]")  # in names of components
_ERROR = open_object({"error": {"type": "string"}}, ["error"])
_ERROR_REF = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ERRORS = {
    "400": "The request is wrong; the error names the place, what came and what was expected.",
    "401": "The bearer token is missing or another one.",
    "404": "There is no such model, version or label.",
    "413": "The body is longer than the server takes.",
    "429": "The server is full; try again after the seconds of Retry-After.",
    "503": "The server cannot answer now.",
}


def document(
    protocols: Iterable[ModelProtocol], registry: ModelRegistry, limits: Limits, *, needs_token: bool
) -> dict[str, Any]:
    """The document; each model's schemas are the schemas of its version with the largest weight."""
    protocols = sorted(protocols, key=lambda protocol: protocol.about)  # ``about`` begins with the protocol's name
    routes = [route for protocol in protocols for route in protocol.routes()]
    of_models = [route for route in routes if _MODEL in route.path]
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths = _paths((route for route in routes if route not in of_models), ModelSchemas(""), {})
    for at, name in enumerate(registry.names()):
        weights = registry.weights(name)
        model = registry.get(name, max(weights, key=weights.__getitem__))
        prefix = f"{_NO_NAME.sub('_', name)}.{at}." if _NO_NAME.search(name) else f"{name}."
        made = ModelSchemas(prefix)
        for protocol in protocols:
            protocol.add_schemas(model, made)
        schemas |= made.components
        paths |= _paths(of_models, made, _parameters(model, list(registry.labels(name))), name)
    about = _ABOUT.format(
        number=_NUMBERS.get(len(protocols), len(protocols)),
        protocols=", ".join(protocol.about for protocol in protocols),
        bytes=limits.max_message_bytes,
        batch=limits.max_batch,
        ids=limits.max_ids,
    )
    components: dict[str, Any] = {"schemas": schemas}
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "recinfer", "version": __version__, "description": about},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in sorted({route.described.tag for route in routes if route.described})],
        "paths": paths,
        "components": components,
    }
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"token": []}]
    return whole


def _parameters(model: ServedModel, labels: list[str]) -> dict[str, Schema]:
    """Schemas of the parameters in a model's paths; ``label`` is missing if the model has no labels."""
    found: dict[str, Schema] = {"version": {"type": "string", "default": model.version}}
    if labels:
        found["label"] = {"type": "string", "enum": labels, "default": labels[0]}
    return found


def _paths(
    routes: Iterable[Route], schemas: ModelSchemas, parameters: Mapping[str, Schema], name: str = ""
) -> dict[str, Any]:
    """The routes that the model ``name`` answers; without a name, routes of no model."""
    found: dict[str, Any] = {}
    for route in routes:
        described, at = route.described, _PARAMETER.findall(route.path.replace(_MODEL, ""))
        if described is None or not parameters.keys() >= set(at):
            continue
        if isinstance(route, Post) and described.request not in schemas.examples:
            continue
        answer = described.response
        schema = schemas.reference(answer) if isinstance(answer, str) else answer
        operation: dict[str, Any] = {
            "tags": [described.tag],
            "summary": described.summary.replace(_MODEL, name),
            "operationId": "_".join([schemas.prefix + described.operation, *at]),
        }
        if at:
            operation["parameters"] = [
                {"name": each, "in": "path", "required": True, "schema": parameters[each]} for each in at
            ]
        if isinstance(route, Post):
            body = schemas.body(described.request)
            operation["requestBody"] = {"required": True, "content": {"application/json": body}}
        elif route.is_open:
            operation["security"] = []
        content = {"application/json": {"schema": schema}}
        errors = _errors(*(_ERRORS if isinstance(route, Post) else ("401", "404")))
        operation["responses"] = {"200": {"description": "The answer.", "content": content}, **errors}
        found[route.path.replace(_MODEL, quote(name, safe=""))] = {route.method.lower(): operation}
    return found


def _errors(*codes: str) -> dict[str, Any]:
    found: dict[str, Any] = {code: {"description": _ERRORS[code], "content": _ERROR_REF} for code in codes}
    if "429" in found:
        seconds = {"description": "Whole seconds.", "schema": {"type": "integer"}}
        found["429"]["headers"] = {"Retry-After": seconds}
    return found
