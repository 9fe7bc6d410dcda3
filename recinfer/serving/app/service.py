"""The interface of a server with all that runs with it, whatever its role; its content and addresses once it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from recinfer.serving.server.telemetry.metrics import Status

__all__ = ["Ready", "ReadyModels", "ReadyRanks", "Report", "Service"]

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


@dataclass(frozen=True)
class ReadyModels:
    """The content and addresses of a server of whole models.

    Attributes:
        model, version: the default model, and the first of its versions.
        serving: ``"model version"`` for each version.
        engines: a line per version that names the engine of its dense part.
        host: the address that all ports listen on.
        port, http_port, metrics_port: the bound TCP ports; None: no such port.
        unix_socket: the Unix socket on which gRPC listens too; None: none.
    """

    model: str
    version: str
    serving: tuple[str, ...]
    engines: tuple[str, ...]
    host: str
    port: int
    http_port: int | None
    metrics_port: int | None
    unix_socket: str | None = None


@dataclass(frozen=True)
class ReadyRanks:
    """The content and addresses of a shard server.

    Attributes:
        ranks: the ranks that it holds.
        versions: keys of the mapped versions (recinfer.serving.shards.versions).
        held: ``"model version"`` for each of them.
        host: the address that all ports listen on.
        port, metrics_port: the bound TCP ports; None: no such port.
    """

    ranks: tuple[int, ...]
    versions: tuple[str, ...]
    held: tuple[str, ...]
    host: str
    port: int
    metrics_port: int | None


Ready = ReadyModels | ReadyRanks
