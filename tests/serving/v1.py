"""Requests of the V1 protocol: bodies from KeyedJaggedTensors, asked with urllib."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from torch import Tensor

from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["ask", "columns_of", "get", "post", "rows_of"]


def columns_of(features: KeyedJaggedTensor, dense: Tensor | None = None) -> dict[str, Any]:
    """``inputs`` of a request."""
    found: dict[str, Any] = {}
    for name, one in features.to_dict().items():
        lengths = one.lengths().tolist()
        found[name] = [part.tolist() for part in one.values().split(lengths)]
        if one.weights_or_none() is not None:
            found[name] = {"ids": found[name], "weights": [part.tolist() for part in one.weights().split(lengths)]}
    return found if dense is None else {**found, "dense": dense.tolist()}


def rows_of(features: KeyedJaggedTensor, dense: Tensor | None = None) -> list[dict[str, Any]]:
    """``instances`` of a request."""
    columns = columns_of(features, dense)
    for name, column in columns.items():
        if isinstance(column, dict):
            columns[name] = [{"ids": ids, "weights": own} for ids, own in zip(column["ids"], column["weights"])]
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def ask(server: Server, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of a POST to ``/v1/models/`` and ``path``; ``body`` as it is, or as JSON."""
    return post(server, f"/v1/models/{path}", body, **headers)


def post(server: Server, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Of a POST to ``path``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _opened(urllib.request.Request(_root(server) + path, data, headers))


def get(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Of a GET of ``path``."""
    return _opened(urllib.request.Request(_root(server) + path, headers=headers))


def _root(server: Server) -> str:
    return f"http://127.0.0.1:{server.http_port}"


def _opened(request: urllib.request.Request) -> tuple[int, dict[str, str], Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.loads(error.read())
