"""The interface of a server with all that runs with it, whatever its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from recinfer.serving.app.ready import Ready
from recinfer.serving.server.telemetry.metrics import Status

__all__ = ["Report", "Service"]

Report = Callable[[str], None]
"""Takes a line of text about the server's progress."""


class Service(Protocol):
    """A server of one role that has loaded its models and has not started."""

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Serve until SIGTERM or SIGINT, then end; call from the main thread.

        Args:
            on_ready: called once requests are accepted.
        """

    def start(self) -> Ready:
        """Serve in the background, from any thread; returns once requests are accepted."""

    async def status(self) -> Status:
        """The figures of the server, see recinfer.serving.server.telemetry.metrics; await on the serving loop."""

    def stop(self, grace: float) -> None:
        """Let running requests end for up to ``grace`` seconds, then close all that ``start`` opened."""
