"""The metrics port: ``/metrics`` for Prometheus, ``/status.json``, ``/ready``, ``/live``, and ``/``, a page for people."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web
from aiohttp.typedefs import Handler

from recinfer.serving.server.http_site import HttpSite, as_bearer
from recinfer.serving.server.telemetry.metrics import Status
from recinfer.serving.server.telemetry.prometheus import prometheus_text

__all__ = ["MetricsServer"]

_PROMETHEUS = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
# The page is one file and loads nothing else; this policy has the browser enforce it.
_PAGE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

_READY, _LIVE = "/ready", "/live"  # open to all, as gRPC's health is


class MetricsServer:
    """Serves metrics on one port, on the event loop that ``start`` is awaited on.

    Args:
        status: gives the status that is shown (see recinfer.serving.server.telemetry.metrics).
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        allows: whether a request with this ``Authorization: Bearer`` header may pass. A browser, which prompts its user for
            a name and a password, passes with the token as the password.
        tls: the server's TLS context; None: plain HTTP.
    """

    def __init__(
        self,
        status: Callable[[], Awaitable[Status]],
        host: str,
        port: int,
        *,
        allows: Callable[[str | None], bool] = lambda authorization: True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._status, self.host, self.port, self._allows, self._tls = status, host, port, allows, tls
        self._page = files("recinfer.serving.server.telemetry").joinpath("status_page.html").read_text(encoding="utf-8")
        self._site: HttpSite | None = None

    async def start(self) -> None:
        """Bind and answer; raises OSError when the address cannot be bound."""
        app = web.Application(client_max_size=1 << 16, middlewares=[self._check])
        app.router.add_get("/", self._show_page)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/status.json", self._show_status)
        app.router.add_get(_READY, self._show_ready)
        app.router.add_get(_LIVE, self._show_live)
        self._site = HttpSite(app, self.host, self.port, tls=self._tls)
        await self._site.start()
        self.port = self._site.port

    async def stop(self) -> None:
        """Close the port."""
        site, self._site = self._site, None
        if site is not None:
            await site.stop()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in (_READY, _LIVE) or self._allows(as_bearer(request.headers.get("Authorization"))):
            return await handler(request)
        headers = {"WWW-Authenticate": 'Basic realm="recinfer: the token as the password", charset="UTF-8"'}
        return web.Response(status=401, text="this page needs the server's token", headers=headers)

    async def _show_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=_PAGE)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(await self._status()), headers=_PROMETHEUS)

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._status(), headers={"Cache-Control": "no-store"})

    async def _show_ready(self, request: web.Request) -> web.Response:
        ready = bool((await self._status())["ready"])
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _show_live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})
