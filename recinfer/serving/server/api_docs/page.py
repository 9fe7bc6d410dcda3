"""``/openapi.json``, and ``/docs``, which shows it with Swagger UI: its files come from an installed package, from no other host."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

from aiohttp import web

from recinfer.errors import NotFoundError
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.server.api_docs.document import document
from recinfer.serving.server.http_server import Get, ModelProtocol, Route
from recinfer.serving.wire.json_codec import json_text
from recinfer.serving.wire.limits import Limits

__all__ = ["ApiDocs"]

_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript", "favicon-32x32.png": "image/png"}
_START = """window.onload = () => SwaggerUIBundle({
  url: "openapi.json", dom_id: "#viewer", tryItOutEnabled: true, docExpansion: "list", validatorUrl: null,
});
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>recinfer</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="docs/swagger-ui.css"><link rel="icon" href="docs/favicon-32x32.png">
</head><body><div id="viewer"></div>
<script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script>
</body></html>
"""
# The viewer loads nothing from other hosts, and this policy makes the browser enforce that. The viewer sets styles on
# its elements.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class ApiDocs:
    """The paths that describe a port. See recinfer.serving.server.http_server.HttpProtocol.

    Args:
        protocols: that are described.
        registry: the models.
        limits: bounds on requests.
        needs_token: whether requests need a token.
    """

    paths = "/, /docs, /openapi.json"

    def __init__(
        self, protocols: Sequence[ModelProtocol], registry: ModelRegistry, limits: Limits, needs_token: bool
    ) -> None:
        self._make = partial(document, protocols, registry, limits, needs_token=needs_token)

    def routes(self) -> list[Route]:
        """The root, the document, the page, and its files."""
        files = [Get(f"/docs/{name}", "Docs", partial(self._file, name), for_people=True) for name in _FILES]
        return [
            Get("/", "ServerLive", self._root, is_open=True),
            Get("/openapi.json", "OpenAPI", self._document, for_people=True),
            Get("/docs", "Docs", self._page, for_people=True),
            Get("/docs/start.js", "Docs", self._start, for_people=True),
            *files,
        ]

    async def _root(self, request: web.Request) -> web.Response:
        """Send a browser to the page; for other callers this path is KServe V1's liveness."""
        headers = {"Vary": "Accept"}
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(status=302, headers={**headers, "Location": "docs"})
        return web.json_response({"status": "alive"}, headers=headers)

    async def _document(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(lambda: json_text(self._make()))
        return web.Response(text=text, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _page(self, request: web.Request) -> web.Response:
        _folder()
        return web.Response(text=_PAGE, content_type="text/html", headers=_HEADERS)

    async def _start(self, request: web.Request) -> web.Response:
        return web.Response(text=_START, content_type="text/javascript", headers=_HEADERS)

    async def _file(self, name: str, request: web.Request) -> web.Response:
        data = await asyncio.to_thread(_read, name)
        headers = {**_HEADERS, "Cache-Control": "max-age=3600"}
        return web.Response(body=data, content_type=_FILES[name], headers=headers)


@lru_cache(maxsize=len(_FILES))
def _read(name: str) -> bytes:
    """The bytes of a viewer's file, cached so that concurrent requests share them."""
    return (_folder() / name).read_bytes()


def _folder() -> Path:
    """The folder of the viewer's files; the package's own code, for other web frameworks, is not imported."""
    found = importlib.util.find_spec("swagger_ui")
    if found is None or not found.submodule_search_locations:
        raise NotFoundError(
            "docs: the viewer is not installed here; pip install 'recinfer[serve]', or read /openapi.json"
        )
    return Path(found.submodule_search_locations[0]) / "static"
