"""Watchers of the health service: each gets every change, and the last status before the server ends them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from recinfer.serving.server.health import EndingHealth

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def turns() -> None:
    """Some turns of the event loop: all ready tasks, and those that they make ready, have run."""
    for _ in range(10):
        await asyncio.sleep(0)


class Call:
    """A watcher, whose status messages are not delivered until ``ready``."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.ready = asyncio.Event()
        self.ready.set()

    async def write(self, answer: Any) -> None:
        await self.ready.wait()
        self.heard.append(answer.status)


def watch(health: EndingHealth, call: Call, service: str = "a") -> asyncio.Task[None]:
    return asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(service=service), call))


def test_watcher_that_leaves_does_not_affect_the_others():
    async def main() -> None:
        health = EndingHealth()
        await health.set("a", SERVING)
        calls = [Call() for _ in range(3)]
        first, second, third = (watch(health, call) for call in calls)
        await turns()
        first.cancel()
        await turns()
        await health.set("a", NOT_SERVING)
        await turns()
        await health.set("a", SERVING)
        await turns()
        await health.end()
        await asyncio.gather(second, third)
        assert calls[0].heard == [SERVING]
        assert calls[1].heard == calls[2].heard == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_watchers_get_the_last_status(monkeypatch: pytest.MonkeyPatch):
    """However slow the machine is, a watcher is not ended before it has the last status."""
    monkeypatch.setattr("recinfer.serving.server.health._NOTICED_S", 60.0)

    async def main() -> None:
        health = EndingHealth()
        await health.set("a", SERVING)
        call = Call()
        watching = watch(health, call)
        await turns()
        call.ready.clear()
        ending = asyncio.create_task(health.end())
        await turns()
        assert not ending.done()
        call.ready.set()
        await ending
        assert call.heard == [SERVING, NOT_SERVING]
        await watching

    asyncio.run(asyncio.wait_for(main(), 60))


def test_watcher_that_reads_nothing_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.server.health._NOTICED_S", 0.01)

    async def main() -> None:
        health = EndingHealth()
        call = Call()
        call.ready.clear()
        watching = watch(health, call, "")
        await turns()
        await health.end()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert call.heard == []

    asyncio.run(asyncio.wait_for(main(), 60))
