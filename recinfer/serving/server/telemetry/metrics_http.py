"""The metrics port: ``/metrics`` for Prometheus, ``/status.json``, ``/history.json``, ``/ready``, ``/live``, and ``/``, a page for
people."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from recinfer.serving.engine.memory_budget import MemoryBudget
from recinfer.serving.server.http_server import Get, HttpServer, Route
from recinfer.serving.server.security import Security
from recinfer.serving.server.telemetry.metrics import Status, answers_of
from recinfer.serving.server.telemetry.prometheus import prometheus_text
from recinfer.serving.wire.address import check_address

__all__ = ["metrics_server", "start_metrics"]

_PROMETHEUS = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
# The page is one file and loads nothing else; this policy has the browser enforce it.
_PAGE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

# The memory budget of the pages is apart from the server's: a server that is full still shows its figures.
_BUDGET_BYTES = 64 << 20
_SPACING_S, _POINTS = 5.0, 121  # ten minutes
_log = logging.getLogger(__name__)


def metrics_server(status: Callable[[], Awaitable[Status]], host: str, port: int, security: Security) -> HttpServer:
    """The server of the metrics port; the caller starts it.

    Args:
        status: returns the status to show (see recinfer.serving.server.telemetry.metrics).
        host, port: address to listen on; port 0 takes a free port.
        security: TLS and token of the port. ``/ready`` and ``/live`` are open to all, as gRPC's health is.
    """
    check_address(host, port)
    history = History(status)
    return MetricsServer(
        history,
        [_Pages(status, history)],
        MemoryBudget(_BUDGET_BYTES),
        0,
        host,
        port,
        allows=security.allows,
        tls=security.tls_context(lets_probes_in=True),
        needs_certificate=security.client_ca is not None,
    )


async def start_metrics(status: Callable[[], Status], host: str, port: int, security: Security) -> HttpServer:
    """A metrics server that has started, of a server whose ``status`` needs no wait; see :func:`metrics_server`."""

    async def found() -> Status:
        return status()

    server = metrics_server(found, host, port, security)
    await server.start()
    return server


class History:
    """The answers of the last ten minutes, for a page that is opened now.

    Args:
        status: returns the status to record.
    """

    def __init__(self, status: Callable[[], Awaitable[Status]]) -> None:
        self._status = status
        self._points: deque[Status] = deque(maxlen=_POINTS)
        self._task: asyncio.Task[None] | None = None

    def points(self) -> list[Status]:
        """The parts of statuses that :func:`recinfer.serving.server.telemetry.metrics.answers_of` takes, oldest first."""
        return list(self._points)

    def start(self) -> None:
        """Record a status every five seconds from now on; call on the event loop."""
        self._task = asyncio.create_task(self._record())

    def stop(self) -> None:
        """Record no more."""
        if self._task is not None:
            self._task.cancel()

    async def _record(self) -> None:
        while True:
            try:
                self._points.append(answers_of(await self._status()))
            except Exception:  # a worker that is being replaced gives no status
                _log.debug("no status for the history", exc_info=True)
            await asyncio.sleep(_SPACING_S)


class MetricsServer(HttpServer):
    """The HTTP server of the metrics port; it records the history while it runs.

    Args:
        history: the history.
        args, options: HttpServer's.
    """

    def __init__(self, history: History, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._history = history

    async def start(self) -> None:
        """See HttpServer."""
        await super().start()
        self._history.start()

    async def stop(self, grace: float = 1.0) -> None:
        """See HttpServer."""
        self._history.stop()
        await super().stop(grace)


class _Pages:
    """The pages of the port. See recinfer.serving.server.http_server.HttpProtocol."""

    paths = "/, /metrics, /status.json, /history.json, /ready, /live"

    def __init__(self, status: Callable[[], Awaitable[Status]], history: History) -> None:
        self._status = status
        self._history = history
        self._page = files("recinfer.serving.server.telemetry").joinpath("status_page.html").read_text(encoding="utf-8")

    def routes(self) -> list[Route]:
        """The routes of all pages."""
        return [
            Get("/", "StatusPage", self._show_page, for_people=True),
            Get("/metrics", "Metrics", self._show_metrics, for_people=True),
            Get("/status.json", "Status", self._show_status, for_people=True),
            Get("/history.json", "History", self._show_history, for_people=True),
            Get("/ready", "Ready", self._show_ready, is_open=True),
            Get("/live", "Live", self._show_live, is_open=True),
        ]

    async def _show_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=_PAGE)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(await self._status()), headers=_PROMETHEUS)

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._status(), headers={"Cache-Control": "no-store"})

    async def _show_history(self, request: web.Request) -> web.Response:
        return web.json_response(self._history.points(), headers={"Cache-Control": "no-store"})

    async def _show_ready(self, request: web.Request) -> web.Response:
        ready = bool((await self._status())["ready"])
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _show_live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})
