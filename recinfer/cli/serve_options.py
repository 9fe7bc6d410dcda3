"""The options of ``recinfer serve``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from recinfer.cli.console import JsonOption
from recinfer.cli.declared import settings
from recinfer.cli.options import Device, MissingShards
from recinfer.errors import ConfigError
from recinfer.serving.config import (
    AddressConfig,
    ModelsConfig,
    RoleConfig,
    SecurityConfig,
    ServeConfig,
    TablesConfig,
)
from recinfer.serving.server.http_protocols import HTTP_PROTOCOLS
from recinfer.serving.wire.limits import BatchConfig, Limits

__all__ = [
    "AddressOptions",
    "BatchOptions",
    "LimitOptions",
    "ModelOptions",
    "RoleOptions",
    "SecurityOptions",
    "ServeOptions",
    "TableOptions",
    "parse_ranks",
]

_PORT = 8500
"""The port of ``recinfer serve``; a server of a Python program has a free port by default."""
_DEVICE = Device(TablesConfig.device)
_MIB = 20  # bits


@dataclass(frozen=True)
class AddressOptions:
    """Addresses that the server listens on, its connections, and its log format."""

    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port for gRPC; 0 picks a free port and prints it.")
    ] = _PORT
    host: Annotated[
        str,
        typer.Option(
            help="Address that all ports listen on: 0.0.0.0 is all of IPv4, :: all of IPv4 and IPv6, a name its first IPv4 "
            "address, else its first IPv6 address."
        ),
    ] = AddressConfig.host
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Also serve REST on this TCP port: {', '.join(known.title for known in HTTP_PROTOCOLS)}, and /docs; "
            "0 picks a free port.",
        ),
    ] = AddressConfig.http_port
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve Prometheus metrics and a status page on this TCP port; 0 picks a free port."
        ),
    ] = AddressConfig.metrics_port
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the log to stderr as JSON, with one line per request.")
    ] = AddressConfig.log_json

    unix_socket: Annotated[
        Path | None,
        typer.Option(
            "--unix-socket",
            metavar="PATH",
            help="Also serve gRPC on this Unix socket, without TLS; clients call unix:PATH. The file has the rights 0660.",
            show_default=False,
        ),
    ] = AddressConfig.unix_socket
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Let pages of this origin, such as https://shop.example, send requests to the HTTP port; * is all origins; "
            "repeatable.",
            show_default=False,
        ),
    ] = None
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", min=0, help="Let running requests end for this long after the signal to stop."),
    ] = AddressConfig.drain_seconds
    idle_seconds: Annotated[
        float | None,
        typer.Option(
            "--idle-seconds",
            min=0.1,
            help="Close a connection that has no request for this long.",
            show_default="75 for HTTP, never for gRPC",
        ),
    ] = AddressConfig.idle_seconds

    def config(self) -> AddressConfig:
        """The settings that the options give; raises ConfigError."""
        return settings(AddressConfig, self, cors_origins=tuple(self.cors_origin or ()))


@dataclass(frozen=True)
class TableOptions:
    """How tables are held and looked up."""

    PANEL: ClassVar[str] = "Tables"

    device: Annotated[Device, typer.Option(help="Device for embedding lookups; cuda puts rank r on GPU r.")] = _DEVICE
    preload: Annotated[
        bool, typer.Option("--preload", help="Read all pages of the tables before the first request.")
    ] = TablesConfig.preload
    lock: Annotated[bool, typer.Option("--lock", help="Read all pages and lock them in memory (mlock).")] = (
        TablesConfig.lock
    )
    reuse_outputs: Annotated[
        bool, typer.Option("--reuse-outputs", help="Reuse the memory of responses above 32 MiB for later responses.")
    ] = TablesConfig.reuse_outputs

    def config(self) -> TablesConfig:
        """The settings that the options give."""
        return settings(TablesConfig, self, device=self.device.value)


@dataclass(frozen=True)
class ModelOptions:
    """Deltas, the model store, and how many processes serve the models."""

    PANEL: ClassVar[str] = "Models and workers"

    delta: Annotated[
        list[Path] | None,
        typer.Option("--delta", help="Delta to apply to the archive before serving; repeatable, in order."),
    ] = None
    model_store: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            help="Folder or URL with archives at <model>/<version>; the newest version of each model is served.",
        ),
    ] = None
    poll: Annotated[
        float | None,
        typer.Option(
            "--poll",
            min=0.01,
            metavar="SECONDS",
            help="Read the model store this often: load versions that appear, unload versions that disappear.",
            show_default=False,
        ),
    ] = ModelsConfig.poll
    model_config: Annotated[
        Path | None,
        typer.Option(
            "--model-config",
            help="TOML or JSON file with the models, versions, labels and weights to serve from the store. The "
            "server reads it again on SIGHUP and with --poll.",
            show_default=False,
        ),
    ] = ModelsConfig.model_config
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Enable the Admin API: load, unload, label and weight versions of the model store."
        ),
    ] = ModelsConfig.admin
    workers: Annotated[
        int,
        typer.Option(min=1, max=256, help="Number of serving processes; they share the port and the archive's memory."),
    ] = ModelsConfig.workers
    worker_timeout: Annotated[
        float,
        typer.Option(min=1, help="Kill and replace a worker that gives no response for this many seconds."),
    ] = ModelsConfig.worker_timeout
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for archives that are downloaded from a URL.",
            show_default="RECINFER_CACHE, or ~/.cache/recinfer",
        ),
    ] = ModelsConfig.cache_dir
    cache_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most bytes of archives in that folder; archives that no process uses make room.",
            show_default="no bound",
        ),
    ] = ModelsConfig.cache_bytes

    def config(self) -> ModelsConfig:
        """The settings that the options give; raises ConfigError."""
        return settings(ModelsConfig, self, deltas=tuple(self.delta or ()))


@dataclass(frozen=True)
class BatchOptions:
    """How many samples one run may merge, and how many requests may be queued."""

    PANEL: ClassVar[str] = "Batching"

    max_batch: Annotated[int, typer.Option(min=1, help="Most samples that the scheduler merges into one run.")] = (
        BatchConfig.max_batch
    )
    max_queue: Annotated[
        int, typer.Option(min=1, help="Most queued requests; further requests fail at once with RESOURCE_EXHAUSTED.")
    ] = BatchConfig.max_queue

    def config(self) -> BatchConfig:
        """The settings that the options give; raises ConfigError."""
        return settings(BatchConfig, self)


@dataclass(frozen=True)
class LimitOptions:
    """Limits on one request, and on the memory of all requests."""

    PANEL: ClassVar[str] = "Limits"

    max_samples: Annotated[int, typer.Option(min=1, help="Most samples in one request.")] = Limits.max_batch
    max_ids: Annotated[int, typer.Option(min=1, help="Most ids in one request.")] = Limits.max_ids
    max_features: Annotated[int, typer.Option(min=1, help="Most features in one request.")] = Limits.max_keys
    max_message_mib: Annotated[int, typer.Option(min=1, max=2047, help="Largest request, in MiB.")] = (
        Limits.max_message_bytes >> _MIB
    )
    max_response_mib: Annotated[int, typer.Option(min=1, max=2047, help="Largest response, in MiB of vectors.")] = (
        Limits.max_response_bytes >> _MIB
    )
    memory_budget_mib: Annotated[
        int,
        typer.Option(min=32, help="Memory of all requests and responses of one process, in MiB."),
    ] = Limits.memory_budget_bytes >> _MIB
    max_streams: Annotated[int, typer.Option(min=1, help="Most open calls on one connection.")] = Limits.max_concurrent

    def config(self) -> Limits:
        """The limits that the options give; raises ConfigError."""
        return Limits(
            max_message_bytes=self.max_message_mib << _MIB,
            max_batch=self.max_samples,
            max_ids=self.max_ids,
            max_keys=self.max_features,
            max_response_bytes=self.max_response_mib << _MIB,
            max_concurrent=self.max_streams,
            memory_budget_bytes=self.memory_budget_mib << _MIB,
        )


@dataclass(frozen=True)
class SecurityOptions:
    """Authentication and TLS."""

    PANEL: ClassVar[str] = "Security"

    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token that every call must carry, or with two, one per line; read again when it "
            "changes. Default: RECINFER_TOKEN."
        ),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's private key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of the certificate authority that signs client certificates (mutual TLS)."),
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow --host beyond loopback without a token.")] = (
        SecurityConfig.insecure
    )

    def config(self) -> SecurityConfig:
        """The settings that the options give."""
        return settings(SecurityConfig, self)


@dataclass(frozen=True)
class RoleOptions:
    """The role of this server when several hosts serve one model."""

    PANEL: ClassVar[str] = "Several hosts"

    ranks: Annotated[
        str | None, typer.Option(help="Run as a shard server that holds only these ranks, as in 0,1 or 0-3.")
    ] = None
    socket_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="TCP port of a shard server for lookups from rankers; 0 picks a free port, which rankers discover.",
        ),
    ] = RoleConfig.socket_port
    shards: Annotated[
        Path | None,
        typer.Option(help="Run as a ranker that looks up embeddings in the shard servers of this shards.json."),
    ] = None
    missing_shards: Annotated[
        MissingShards | None,
        typer.Option(
            help="When a ranker reaches no replica of a rank: error, or default-rows (flagged in the response).",
            show_default="as the archive allows",
        ),
    ] = None

    def config(self) -> RoleConfig:
        """The settings that the options give; raises ConfigError."""
        ranks = None if self.ranks is None else parse_ranks(self.ranks)
        missing_shards = None if self.missing_shards is None else self.missing_shards.setting
        return settings(RoleConfig, self, ranks=ranks, missing_shards=missing_shards)


@dataclass(frozen=True)
class ServeOptions:
    """All options of ``recinfer serve``."""

    address: AddressOptions
    tables: TableOptions
    models: ModelOptions
    batching: BatchOptions
    limits: LimitOptions
    security: SecurityOptions
    roles: RoleOptions
    archives: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARCHIVE|URL]...",
            help="Archive folders or URLs; the first is the default model.",
            show_default=False,
        ),
    ] = None
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False
    worker_config: Annotated[str | None, typer.Option("--worker-config", hidden=True)] = None
    as_json: JsonOption = False

    def config(self) -> ServeConfig:
        """The settings that the options give, or a worker's, as its supervisor passes them; raises ConfigError."""
        if self.worker_config is not None:
            return ServeConfig.from_json(self.worker_config)
        return ServeConfig(
            archives=tuple(self.archives or ()),
            role=self.roles.config(),
            address=self.address.config(),
            tables=self.tables.config(),
            models=self.models.config(),
            batching=self.batching.config(),
            limits=self.limits.config(),
            security=self.security.config(),
        )


def parse_ranks(text: str) -> tuple[int, ...]:
    """``"0,1"`` or ``"0-3"`` as ranks; raises ConfigError."""
    from recinfer.distributed.planner.plan import MAX_RANKS

    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, -1)
        if not first <= last < MAX_RANKS:
            raise ConfigError(f"--ranks: got {text[:80]!r}, expected numbers below {MAX_RANKS}, as in 0,1 or 0-3")
        ranks += range(first, last + 1)
    return tuple(sorted(set(ranks)))
