"""The options of ``recinfer serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from recinfer.cli.console import JsonOption
from recinfer.cli.options import Device, MissingShards
from recinfer.serving.server.http_protocols import HTTP_PROTOCOLS

__all__ = [
    "AddressOptions",
    "BatchOptions",
    "LimitOptions",
    "ModelOptions",
    "RoleOptions",
    "SecurityOptions",
    "ServeOptions",
    "TableOptions",
]


@dataclass(frozen=True)
class AddressOptions:
    """Addresses that the server listens on, and its log format."""

    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port for gRPC; 0 picks a free port and prints it.")
    ] = 8500
    host: Annotated[
        str,
        typer.Option(
            help="Address that all ports listen on: 0.0.0.0 is all of IPv4, :: all of IPv4 and IPv6, a name its first IPv4 "
            "address, else its first IPv6 address."
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Also serve REST on this TCP port: {', '.join(known.title for known in HTTP_PROTOCOLS)}, and /docs; "
            "0 picks a free port.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve Prometheus metrics and a status page on this TCP port; 0 picks a free port."
        ),
    ] = None
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write the log to stderr as JSON, with one line per request.")
    ] = False


@dataclass(frozen=True)
class TableOptions:
    """How tables are held and looked up."""

    PANEL: ClassVar[str] = "Tables"

    device: Annotated[Device, typer.Option(help="Device for embedding lookups; cuda puts rank r on GPU r.")] = (
        Device.cpu
    )
    preload: Annotated[
        bool, typer.Option("--preload", help="Read all pages of the tables before the first request.")
    ] = False
    lock: Annotated[bool, typer.Option("--lock", help="Read all pages and lock them in memory (mlock).")] = False
    lookup_threads: Annotated[int, typer.Option(min=1, max=64, help="Most threads that one large lookup may use.")] = 1
    join_columns: Annotated[
        bool,
        typer.Option(
            "--join-columns",
            help="Copy column-wise sharded tables into whole rows: faster, but the copy is not shared between "
            "processes.",
        ),
    ] = False
    reuse_outputs: Annotated[
        bool, typer.Option("--reuse-outputs", help="Reuse the memory of responses above 32 MiB for later responses.")
    ] = False


@dataclass(frozen=True)
class ModelOptions:
    """Deltas, the model store, and how many processes serve the models."""

    PANEL: ClassVar[str] = "Models and workers"

    delta: Annotated[
        list[Path] | None,
        typer.Option("--delta", help="Delta to apply to the archive before serving; repeatable, in order."),
    ] = None
    model_store: Annotated[
        Path | None,
        typer.Option(help="Folder with archives at <model>/<version>; the newest version of each model is served."),
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
    ] = None
    model_config: Annotated[
        Path | None,
        typer.Option(
            "--model-config",
            help="TOML or JSON file with the models, versions, labels and weights to serve from the store. The "
            "server reads it again on SIGHUP and with --poll.",
            show_default=False,
        ),
    ] = None
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Enable the Admin API: load, unload, label and weight versions of the model store."
        ),
    ] = False
    workers: Annotated[
        int,
        typer.Option(min=1, max=256, help="Number of serving processes; they share the port and the archive's memory."),
    ] = 1
    worker_timeout: Annotated[
        float,
        typer.Option(min=1, help="Kill and replace a worker that gives no response for this many seconds."),
    ] = 10.0


@dataclass(frozen=True)
class BatchOptions:
    """How many samples one run may merge, and how many requests may be queued."""

    PANEL: ClassVar[str] = "Batching"

    max_batch: Annotated[int, typer.Option(min=1, help="Most samples that the scheduler merges into one run.")] = 1024
    max_queue: Annotated[
        int, typer.Option(min=1, help="Most queued requests; further requests fail at once with RESOURCE_EXHAUSTED.")
    ] = 512


@dataclass(frozen=True)
class LimitOptions:
    """Limits on one request, and on the memory of all requests."""

    PANEL: ClassVar[str] = "Limits"

    max_samples: Annotated[int, typer.Option(min=1, help="Most samples in one request.")] = 16_384
    max_ids: Annotated[int, typer.Option(min=1, help="Most ids in one request.")] = 4_194_304
    max_features: Annotated[int, typer.Option(min=1, help="Most features in one request.")] = 4_096
    max_message_mib: Annotated[int, typer.Option(min=1, max=2047, help="Largest request, in MiB.")] = 64
    max_response_mib: Annotated[int, typer.Option(min=1, max=2047, help="Largest response, in MiB of vectors.")] = 256
    memory_budget_mib: Annotated[
        int,
        typer.Option(min=32, help="Memory of all requests and responses of one process, in MiB."),
    ] = 256
    max_streams: Annotated[int, typer.Option(min=1, help="Most open calls on one connection.")] = 4_096


@dataclass(frozen=True)
class SecurityOptions:
    """Authentication and TLS."""

    PANEL: ClassVar[str] = "Security"

    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token that every call must carry. Default: RECINFER_TOKEN."),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's private key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of the certificate authority that signs client certificates (mutual TLS)."),
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow --host beyond loopback without a token.")] = False


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
    ] = 0
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
        list[Path] | None, typer.Argument(help="Archive folders; the first is the default model.", show_default=False)
    ] = None
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False
    worker_port: Annotated[int | None, typer.Option("--worker-port", hidden=True)] = None
    worker_http_port: Annotated[int | None, typer.Option("--worker-http-port", hidden=True)] = None
    as_json: JsonOption = False
