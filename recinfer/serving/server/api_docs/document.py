"""The OpenAPI 3.1 document of a server: its paths, with the schemas of the models that it has at this moment."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from recinfer import __version__
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.api_docs.schemas import schemas_of
from recinfer.serving.wire.limits import Limits

__all__ = ["document"]

_ABOUT = """Predictions and embedding lookups of recommendation models, by two protocols on this port:
**V1** is TensorFlow Serving's and KServe's REST API (JSON rows or columns), **V2** the Open Inference Protocol (tensors,
also binary). A request may take {bytes} bytes, {batch} samples and {ids} ids."""

_V1, _V2, _HEALTH = "V1: rows and columns", "V2: Open Inference Protocol", "health"
_NO_NAME = re.compile("[^A-Za-z0-9._-]")  # characters that the name of a component cannot have
_ERROR_REF = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ERRORS = {
    "400": "The request is wrong; the error names the place, what came and what was expected.",
    "401": "The bearer token is missing or another one.",
    "404": "There is no such model, version or label.",
    "413": "The body is longer than the server takes.",
    "429": "The server is full; try again after the seconds of Retry-After.",
    "503": "The server cannot answer now.",
}


def document(registry: ModelRegistry, limits: Limits, *, needs_token: bool) -> dict[str, Any]:
    """The document; a model's schemas are those of its version with the largest weight."""
    schemas: dict[str, Any] = {"Error": _object({"error": {"type": "string"}}, ["error"])}
    paths = _common_paths()
    for at, name in enumerate(registry.names()):
        weights = registry.weights(name)
        model = registry.get(name, max(weights, key=weights.__getitem__))
        prefix = f"{_NO_NAME.sub('_', name)}.{at}." if _NO_NAME.search(name) else f"{name}."
        made = schemas_of(model, registry, limits, prefix)
        schemas |= made.components
        paths |= _model_paths(model, prefix, made.examples, list(registry.labels(name)))
    about = _ABOUT.format(bytes=limits.max_message_bytes, batch=limits.max_batch, ids=limits.max_ids)
    components: dict[str, Any] = {"schemas": schemas}
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "recinfer", "version": __version__, "description": about},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in (_V1, _V2, _HEALTH)],
        "paths": paths,
        "components": components,
    }
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"token": []}]
    return whole


def _common_paths() -> dict[str, Any]:
    names = _object({"models": {"type": "array", "items": {"type": "string"}}}, ["models"])
    texts = {"name": {"type": "string"}, "version": {"type": "string"}}
    server = _object({**texts, "extensions": {"type": "array", "items": {"type": "string"}}}, list(texts))
    found = {
        "/v1/models": _get(_V1, "The models", "v1Models", names),
        "/v2": _get(_V2, "The server's name and version", "v2Server", server),
    }
    for path, key in (("/v2/health/live", "live"), ("/v2/health/ready", "ready")):
        schema = _object({key: {"type": "boolean"}}, [key])
        found[path] = _get(_HEALTH, f"Whether the server is {key}", f"health_{key}", schema, is_open=True)
    return found


def _model_paths(model: ServedModel, prefix: str, examples: dict[str, Any], labels: list[str]) -> dict[str, Any]:
    """The paths of one model: alone, with a version, and in V1 with a label if it has labels."""
    found: dict[str, Any] = {}
    version = {"name": "version", "schema": {"type": "string", "default": model.version}}
    label = {"name": "label", "schema": {"type": "string", "enum": labels, "default": labels[0]}} if labels else None
    status = {"type": "object", "required": ["model_version_status"]}
    name, anything = quote(model.name, safe=""), {"type": "object"}
    ways = [("", None), ("/versions/{version}", version), *([("/labels/{label}", label)] if label else [])]
    for where, parameter in ways:
        given = [] if parameter is None else [{**parameter, "in": "path", "required": True}]
        suffix = "" if parameter is None else f"_{parameter['name']}"
        path, v2 = f"/v1/models/{name}{where}", f"/v2/models/{name}{where}"
        made: dict[str, Any] = {}
        for call, text in (("Predict", "Score samples with"), ("Lookup", "Embeddings of ids, by")):
            if f"{call}Request" in examples:
                operation = f"{prefix}v1{call}"
                made[f"{path}:{call.lower()}"] = _post(
                    _V1, f"{text} {model.name}", operation, prefix + call, examples[f"{call}Request"]
                )
        made |= {
            path: _get(_V1, f"Versions of {model.name} and their state", prefix + "status", status),
            path + "/metadata": _get(_V1, f"Inputs and outputs of {model.name}", prefix + "metadata", anything),
        }
        if parameter is None or parameter is version:
            made[v2] = _get(_V2, f"Inputs and outputs of {model.name}", prefix + "v2Metadata", anything)
            made[v2 + "/ready"] = _get(
                _HEALTH, f"Whether {model.name} takes requests", prefix + "ready", anything, is_open=True
            )
            made[v2 + "/infer"] = _post(
                _V2, f"Ask {model.name} by tensors", prefix + "infer", prefix + "Infer", examples["InferRequest"]
            )
        for item in made.values():
            for operation in item.values():
                operation["operationId"] += suffix
                if given:
                    operation["parameters"] = given
        found |= made
    return found


def _get(tag: str, summary: str, operation: str, schema: dict[str, Any], *, is_open: bool = False) -> dict[str, Any]:
    answer = {"description": "The answer.", "content": {"application/json": {"schema": schema}}}
    found = {
        "tags": [tag],
        "summary": summary,
        "operationId": operation,
        "responses": {"200": answer, **_errors("401", "404")},
    }
    return {"get": found | ({"security": []} if is_open else {})}


def _post(tag: str, summary: str, operation: str, schema: str, examples: dict[str, Any]) -> dict[str, Any]:
    def content(kind: str) -> dict[str, Any]:
        return {"schema": {"$ref": f"#/components/schemas/{schema}{kind}"}}

    values = {name: {"value": value} for name, value in examples.items()}
    body = {"required": True, "content": {"application/json": {**content("Request"), "examples": values}}}
    answer = {"description": "The answer.", "content": {"application/json": content("Response")}}
    responses = {"200": answer, **_errors(*_ERRORS)}
    return {
        "post": {
            "tags": [tag],
            "summary": summary,
            "operationId": operation,
            "requestBody": body,
            "responses": responses,
        }
    }


def _errors(*codes: str) -> dict[str, Any]:
    found: dict[str, Any] = {code: {"description": _ERRORS[code], "content": _ERROR_REF} for code in codes}
    if "429" in found:
        seconds = {"description": "Whole seconds.", "schema": {"type": "integer"}}
        found["429"]["headers"] = {"Retry-After": seconds}
    return found


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}
