"""grpc.health.v1 whose watchers are let go when the server stops, so that draining need not wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health

__all__ = ["EndingHealth"]

_NOTICED_S = 0.05


class EndingHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """As grpc_health has it, but a Watch ends once it has said NOT_SERVING for good.

    A Watch never ends by itself, and gRPC's grace is for all calls: one watcher would hold a stop up for all of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watching: set[asyncio.Future[Any]] = set()
        self._ending = False

    async def Watch(self, request: Any, context: Any) -> None:
        """See grpc.health.v1."""
        watching = asyncio.ensure_future(super().Watch(request, context))
        self._watching.add(watching)
        try:
            await watching
        except asyncio.CancelledError:
            watching.cancel()
            if not self._ending:
                raise
        finally:
            self._watching.discard(watching)

    async def end(self) -> None:
        """Say NOT_SERVING to all, and end their calls."""
        await self.enter_graceful_shutdown()
        self._ending = True
        if self._watching:
            await asyncio.sleep(_NOTICED_S)
        for watching in list(self._watching):
            watching.cancel()
