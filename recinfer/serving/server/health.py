"""grpc.health.v1: three answers (started, ready, live), and Watch calls that end when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

__all__ = ["LIVENESS", "READINESS", "EndingHealth"]

READINESS, LIVENESS = "readiness", "liveness"
"""Services that a probe may name in addition to "" (started): "can it answer now" and "is the process well"."""

_NOTICED_S = 1.0  # for watchers to read the last status
_LOOK_S = 0.5  # between two checks for a Watch of readiness, whose changes are not signalled

_Status = health_pb2.HealthCheckResponse


class EndingHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc_health's servicer with NOT_SERVING until :meth:`show`, readiness and liveness. Call it on the event loop alone.

    When the server stops, a Watch sends the last status and ends; each watcher gets every change. In grpc_health a Watch
    never ends by itself, and gRPC's grace period is for all calls: one watcher would delay a stop by the whole period. The
    watchers of a service in grpc_health also share one event, which the first watcher that leaves removes for the others.

    Args:
        is_ready: whether the server can answer now, once it has started; called on the event loop.
    """

    def __init__(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._server_status[""] = _Status.NOT_SERVING
        self._is_ready = is_ready
        self._watching: dict[asyncio.Event, asyncio.Task[Any]] = {}

    def is_ready(self) -> bool:
        """The service "readiness": the server has started, is not stopping, and can answer now."""
        return bool(self._server_status[""] == _Status.SERVING) and self._is_ready()

    def _status(self, service: str) -> Any:
        """The service's status; None: there is no such service."""
        if service == LIVENESS:  # an answer shows that the loop runs
            return _Status.SERVING
        if service == READINESS:
            return _Status.SERVING if self.is_ready() else _Status.NOT_SERVING
        return self._server_status.get(service)

    async def Check(self, request: Any, context: Any) -> Any:
        """See grpc.health.v1."""
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Status(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        """See grpc.health.v1."""
        changed, said = asyncio.Event(), None
        task = asyncio.current_task()
        assert task is not None
        self._watching[changed] = task
        look_s = _LOOK_S if request.service == READINESS else None
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                status = _Status.SERVICE_UNKNOWN if status is None else status
                if status != said:
                    await context.write(_Status(status=status))
                    said = status
                elif self._gracefully_shutting_down:  # no status follows
                    return
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), look_s)
        finally:
            del self._watching[changed]

    async def _set(self, service: str, status: Any) -> None:
        self._server_status[service] = status
        for changed in self._watching:
            changed.set()

    async def show(self, services: Iterable[str], serving: bool) -> None:
        """Set for all of ``services`` whether they have started."""
        for service in services:
            await self.set(service, _Status.SERVING if serving else _Status.NOT_SERVING)

    async def end(self) -> None:
        """Send NOT_SERVING to all watchers, and end their calls."""
        await self.enter_graceful_shutdown()
        if self._watching:
            _, deaf = await asyncio.wait(self._watching.values(), timeout=_NOTICED_S)
            for task in deaf:
                task.cancel()
