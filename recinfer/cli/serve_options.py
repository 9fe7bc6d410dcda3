"""The options of ``recinfer serve``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption
from recinfer.cli.options import Device, MissingShards

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

_LIMITS = "Limits"


@dataclass(frozen=True)
class AddressOptions:
    """Where the server listens, and where it tells of itself."""

    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one and prints it.")] = 8500
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Also REST, on this TCP port: TensorFlow Serving's V1, the Open Inference Protocol, and /docs; 0: a free one.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus metrics, and at / a page for people.")
    ] = None
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log to stderr as JSON, one line a request with its id.")
    ] = False


@dataclass(frozen=True)
class TableOptions:
    """How tables are held and looked up."""

    device: Annotated[Device, typer.Option(help="Where lookups run; cuda puts rank r on GPU r.")] = Device.cpu
    preload: Annotated[bool, typer.Option("--preload", help="Read all pages before the first request.")] = False
    lock: Annotated[bool, typer.Option("--lock", help="Also keep them in memory (mlock).")] = False
    lookup_threads: Annotated[
        int, typer.Option(min=1, max=64, help="Threads that one large lookup may use where that is faster.")
    ] = 1
    join_columns: Annotated[
        bool, typer.Option("--join-columns", help="Copy tables cut by columns into whole rows: faster, not shared.")
    ] = False
    reuse_outputs: Annotated[
        bool, typer.Option("--reuse-outputs", help="Keep the memory of answers above 32 MiB for the next ones.")
    ] = False


@dataclass(frozen=True)
class ModelOptions:
    """What is served beside the archives that are named, and by how many processes."""

    delta: Annotated[list[Path] | None, typer.Option("--delta", help="Delta to apply first; repeatable, in order.")] = (
        None
    )
    model_store: Annotated[
        Path | None, typer.Option(help="Folder of <model>/<version> archives: the newest version of each is served.")
    ] = None
    poll: Annotated[
        float | None,
        typer.Option(
            "--poll",
            min=0.01,
            metavar="SECONDS",
            help="Look at the model store so often: versions that appear are served, those that disappear are not.",
            show_default=False,
        ),
    ] = None
    model_config: Annotated[
        Path | None,
        typer.Option(
            "--model-config",
            help="TOML or JSON: which models and versions of the store, labels and weights. Read again on SIGHUP and with --poll.",
            show_default=False,
        ),
    ] = None
    admin: Annotated[
        bool, typer.Option("--admin", help="Let callers load, unload and weigh versions of the model store.")
    ] = False
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port and the archive.")] = 1
    worker_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds without an answer after which a worker that hangs is killed and replaced."),
    ] = 10.0


@dataclass(frozen=True)
class BatchOptions:
    """How requests share runs, and how many may wait."""

    max_batch: Annotated[int, typer.Option(min=1, help="Samples that requests may share a run with.")] = 1024
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused at once.")] = 512


@dataclass(frozen=True)
class LimitOptions:
    """How large one request may be, and what all of them may hold."""

    max_samples: Annotated[int, typer.Option(min=1, help="Samples in one request.", rich_help_panel=_LIMITS)] = 16_384
    max_ids: Annotated[int, typer.Option(min=1, help="Ids in one request.", rich_help_panel=_LIMITS)] = 4_194_304
    max_features: Annotated[int, typer.Option(min=1, help="Features in one request.", rich_help_panel=_LIMITS)] = 4_096
    max_message_mib: Annotated[
        int, typer.Option(min=1, max=2047, help="MiB of one request.", rich_help_panel=_LIMITS)
    ] = 64
    max_response_mib: Annotated[
        int, typer.Option(min=1, max=2047, help="MiB of one answer's vectors.", rich_help_panel=_LIMITS)
    ] = 256
    memory_budget_mib: Annotated[
        int,
        typer.Option(
            min=32, help="MiB that the requests and answers of a process hold at a time.", rich_help_panel=_LIMITS
        ),
    ] = 256
    max_streams: Annotated[int, typer.Option(min=1, help="Open calls of one connection.", rich_help_panel=_LIMITS)] = (
        4_096
    )


@dataclass(frozen=True)
class SecurityOptions:
    """Who may call, and how calls are hidden from others."""

    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token of all calls; RECINFER_TOKEN does the same.")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority of clients' certificates (mutual TLS).")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")] = False


@dataclass(frozen=True)
class RoleOptions:
    """Whether it is one of several hosts of a model."""

    ranks: Annotated[
        str | None, typer.Option(help="Be a shard server: map and serve only these ranks, as in 0,1 or 0-3.")
    ] = None
    socket_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="TCP port of a shard server where rankers look up; 0: a free one, which they find.",
        ),
    ] = 0
    shards: Annotated[
        Path | None, typer.Option(help="Be a ranker: look up at the shard servers that this shards.json lists.")
    ] = None
    missing_shards: Annotated[
        MissingShards | None,
        typer.Option(
            help="A ranker without a living replica of a rank: refuse, or answer with default rows, flagged.",
            show_default="as the archive allows",
        ),
    ] = None


@dataclass(frozen=True)
class ServeOptions:
    """All of them."""

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
