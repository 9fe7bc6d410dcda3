"""The metrics port: ``/metrics`` for Prometheus, ``/status.json``, and ``/``, a page for people."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

from recinfer.serving.metrics import ServerMetrics

__all__ = ["MetricsDoor"]

_PROMETHEUS = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
# The page is one file and asks nobody else for anything; a browser holds it to that.
_PAGE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class MetricsDoor:
    """Serves metrics on one port, on the event loop that ``start`` is awaited on."""

    def __init__(self, metrics: ServerMetrics, host: str, port: int) -> None:
        self._metrics, self.host, self.port = metrics, host, port
        self._page = files("recinfer.serving").joinpath("status_page.html").read_text(encoding="utf-8")
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Bind and answer; raises OSError when the address cannot be bound."""
        app = web.Application(client_max_size=1 << 16)
        app.router.add_get("/", self._show_page)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/status.json", self._show_status)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except OSError:
            await self.stop()
            raise
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _show_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=_PAGE)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.prometheus(), headers=_PROMETHEUS)

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._metrics.status(), headers={"Cache-Control": "no-store"})
