"""The content and addresses of a server, known once it takes requests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ready", "ReadyModels", "ReadyRanks"]


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
