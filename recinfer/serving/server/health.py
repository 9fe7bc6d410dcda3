"""grpc.health.v1 whose watchers are let go when the server stops, so that draining need not wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

__all__ = ["EndingHealth"]

_NOTICED_S = 1.0  # for watchers whose connection takes nothing


class EndingHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """As grpc_health has it, but a Watch ends once it has said NOT_SERVING for good, and each watcher hears all.

    A Watch never ends by itself, and gRPC's grace is for all calls: one watcher would hold a stop up for all of it. There,
    too, the watchers of a service share what wakes them, and the first one that leaves takes it away from the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watching: dict[asyncio.Event, asyncio.Task[Any]] = {}

    async def Watch(self, request: Any, context: Any) -> None:
        """See grpc.health.v1."""
        changed, said = asyncio.Event(), None
        task = asyncio.current_task()
        assert task is not None
        self._watching[changed] = task
        try:
            while True:
                changed.clear()
                status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != said:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    said = status
                elif self._gracefully_shutting_down:  # there is nothing more to say
                    return
                else:
                    await changed.wait()
        finally:
            del self._watching[changed]

    async def _set(self, service: str, status: Any) -> None:
        self._server_status[service] = status
        for changed in self._watching:
            changed.set()

    async def end(self) -> None:
        """Say NOT_SERVING to all, and end their calls."""
        await self.enter_graceful_shutdown()
        if self._watching:
            _, deaf = await asyncio.wait(self._watching.values(), timeout=_NOTICED_S)
            for task in deaf:
                task.cancel()
