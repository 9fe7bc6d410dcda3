"""``recinfer serve``: archives behind a gRPC port."""

from __future__ import annotations

import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer import env
from recinfer.cli.console import JsonOption, Output
from recinfer.cli.options import Device
from recinfer.cli.remote import parse_ranks, serve_ranks, set_serving_when_there, shard_fanout, unchecked, version_in
from recinfer.cli.workers import supervise
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.inference.predictor import Predictor
    from recinfer.serving.registry import ServedModel

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "serve"
EXAMPLE = "Example: recinfer serve movielens.rqa --port 8500"


class MissingShards(StrEnum):
    """What a ranker does without a rank."""

    error = "error"
    default_rows = "default-rows"


def run(
    archives: Annotated[
        list[Path] | None, typer.Argument(help="Archive folders; the first is the default model.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one and prints it.")] = 8500,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    device: Annotated[Device, typer.Option(help="Where lookups run; cuda puts rank r on GPU r.")] = Device.cpu,
    http_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Also the Open Inference Protocol's REST form, on this TCP port."),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus metrics, and at / a page for people.")
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log to stderr as JSON, one line a request with its id.")
    ] = False,
    preload: Annotated[bool, typer.Option("--preload", help="Read all pages before the first request.")] = False,
    lock: Annotated[bool, typer.Option("--lock", help="Also keep them in memory (mlock).")] = False,
    lookup_threads: Annotated[
        int, typer.Option(min=1, max=64, help="Threads that one large lookup may use where that is faster.")
    ] = 1,
    join_columns: Annotated[
        bool, typer.Option("--join-columns", help="Copy tables cut by columns into whole rows: faster, not shared.")
    ] = False,
    reuse_outputs: Annotated[
        bool, typer.Option("--reuse-outputs", help="Keep the memory of answers above 32 MiB for the next ones.")
    ] = False,
    delta: Annotated[
        list[Path] | None, typer.Option("--delta", help="Delta to apply first; repeatable, in order.")
    ] = None,
    model_store: Annotated[
        Path | None, typer.Option(help="Folder of <model>/<version> archives: the newest version of each is served.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Let callers load, unload and weigh versions of the model store.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port and the archive.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples that requests may share a run with.")] = 1024,
    max_delay_us: Annotated[
        int, typer.Option(min=0, help="Microseconds a request may wait for others while several come at a time.")
    ] = 4000,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused at once.")] = 512,
    max_samples: Annotated[int, typer.Option(min=1, help="Samples in one request.", rich_help_panel="Limits")] = 16_384,
    max_ids: Annotated[int, typer.Option(min=1, help="Ids in one request.", rich_help_panel="Limits")] = 4_194_304,
    max_features: Annotated[
        int, typer.Option(min=1, help="Features in one request.", rich_help_panel="Limits")
    ] = 4_096,
    max_message_mib: Annotated[
        int, typer.Option(min=1, max=2047, help="MiB of one request.", rich_help_panel="Limits")
    ] = 64,
    max_response_mib: Annotated[
        int, typer.Option(min=1, max=2047, help="MiB of one answer's vectors.", rich_help_panel="Limits")
    ] = 256,
    max_streams: Annotated[
        int, typer.Option(min=1, help="Open calls of one connection.", rich_help_panel="Limits")
    ] = 4_096,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token of all calls; RECINFER_TOKEN does the same.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority of clients' certificates (mutual TLS).")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Be a shard server: map and serve only these ranks, as in 0,1 or 0-3.")
    ] = None,
    shards: Annotated[
        Path | None, typer.Option(help="Be a ranker: look up at the shard servers that this shards.json lists.")
    ] = None,
    missing_shards: Annotated[
        MissingShards | None,
        typer.Option(help="A ranker without a living replica of a rank: refuse, or answer with default rows, flagged."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve lookups and predictions of archives over gRPC, with health and reflection.

    The port also answers the gRPC form of the Open Inference Protocol (KServe v2).

    Ctrl-C and SIGTERM finish the requests in flight and stop.
    """
    from recinfer.serving.security import Security, read_token

    security = Security(
        token=env.token() if token_file is None else read_token(token_file),
        tls_cert=tls_cert,
        tls_key=tls_key,
        client_ca=tls_client_ca,
        insecure=insecure,
    )
    security.check_host(host)
    security.credentials()  # a file that is not there is found before any table is read
    mine = None if ranks is None else parse_ranks(ranks)
    _check_roles(mine, shards, missing_shards, http_port=http_port, workers=workers, admin=admin, device=device)
    if mine is not None:
        if log_json:
            from recinfer.serving.observe import log_as_json

            log_as_json()
        serve_ranks(
            mine,
            archives or [],
            delta or [],
            model_store,
            Output(as_json),
            host=host,
            port=port,
            metrics_port=metrics_port,
            security=security,
            preload=preload,
            lock=lock,
        )
        return
    if admin and model_store is None:
        raise ConfigError("admin: it loads versions from a model store; give --model-store DIR")
    if workers > 1 and not worker:
        one_first = model_store is not None
        supervise(
            workers, host, port, Output(as_json), metrics_port=metrics_port, security=security, one_first=one_first
        )
        return
    from recinfer.inference.predictor import load
    from recinfer.serving.batcher import BatchConfig
    from recinfer.serving.limits import Limits
    from recinfer.serving.observe import log_as_json
    from recinfer.serving.registry import ModelRegistry, ServedModel
    from recinfer.serving.server import Server, serve
    from recinfer.serving.store import ModelStore, StoreManager, restore
    from recinfer.serving.worker import WorkerLink

    if log_json:
        log_as_json()

    link = WorkerLink() if worker else None
    state = None if link is None else link.restore
    output = Output(as_json)
    fanout = None
    if shards is not None:
        fanout = shard_fanout(shards, security, None if missing_shards is None else missing_shards.name)
    limits = Limits(
        max_message_bytes=max_message_mib << 20,
        max_batch=max_samples,
        max_ids=max_ids,
        max_keys=max_features,
        max_response_bytes=max_response_mib << 20,
        max_concurrent=max_streams,
    )
    options: dict[str, Any] = {
        "device": device.value,
        "preload": preload,
        "lookup_threads": lookup_threads,
        "join_columns": join_columns,
        "reuse_outputs": reuse_outputs,
    }
    store = None
    if model_store is not None:
        from recinfer.serving.remote.lookups import remote_lookups

        lookups = None if fanout is None else remote_lookups(fanout, str(model_store))
        store = ModelStore(model_store, lookups=lookups, **options)
    models: list[ServedModel] = []
    for archive in archives or []:
        version = ""
        if fanout is not None:
            predictor = unchecked(archive, fanout, model_store, {"device": device.value})
            version = version_in(model_store, archive)
        else:
            predictor = load(archive, lock=lock, **options)
        models.append(ServedModel.of(predictor.manifest.model, predictor, version))
    if delta and len(models) != 1:
        raise ConfigError(f"delta: got {len(models)} archives; a delta goes with one archive")
    for path in delta or []:
        models[0].predictor.apply_delta(path)
    if store is not None and state is not None:
        models = restore(state, models, store)
    elif store is not None and fanout is not None:
        # As a shard server does: archives that are named are what it serves, and the store is where others come from.
        for name in [] if archives else store.models():
            version = store.newest_version(name)
            path = store.folder / name / version
            models.append(ServedModel.of(name, unchecked(path, fanout, model_store, {"device": device.value}), version))
    elif store is not None:
        models += [store.newest(name) for name in store.models()]
    if not models:
        raise ConfigError("nothing to serve: give archive folders, or --model-store DIR with archives in it")
    first, registry = models[0], ModelRegistry(models)
    manager = None if store is None else StoreManager(registry, store, state)
    started: list[Server] = []

    stopped = threading.Event()

    def start(server: Server) -> None:
        started.append(server)
        if link is not None:
            link.attach(server, manager)

    def ready(bound: int) -> None:
        if fanout is not None:
            predictors: list[Predictor] = [model.predictor for model in models]
            set_serving_when_there(predictors, fanout, output, started[0].set_serving, stopped)
        output.show(
            f"[green]serving[/green] {', '.join(f'{m.name} {m.version}' for m in models)} on {host}:{bound}  (Ctrl-C stops)"
        )
        if http_port is not None:
            output.show(f"Open Inference Protocol over HTTP on {host}:{http_port}")
        shown = started[0].metrics_port
        if shown is not None:
            output.show(f"status page on http://{host}:{shown}/")
        output.finish(
            {
                "model": first.name,
                "version": first.version,
                "host": host,
                "port": bound,
                "http_port": http_port,
                "metrics_port": shown,
            }
        )

    serve(
        registry,
        shards=fanout,
        serving=fanout is None,
        on_hangup=None if fanout is None else fanout.pool.reload,
        host=host,
        port=port,
        limits=limits,
        http_port=http_port,
        batching=BatchConfig(max_batch=max_batch, max_delay_us=max_delay_us, max_queue=max_queue),
        security=security,
        share_port=worker,
        admin=manager if admin else None,
        admin_through=None if link is None else link.change,
        stop=None if link is None else link.gone,
        metrics_port=None if worker else metrics_port,  # the supervisor's
        on_ready=ready,
        on_start=start,
    )
    stopped.set()
    if fanout is not None:
        fanout.pool.close()
    output.note("stopped")


def _check_roles(
    ranks: list[int] | None,
    shards: Path | None,
    missing: MissingShards | None,
    *,
    http_port: int | None,
    workers: int,
    admin: bool,
    device: Device,
) -> None:
    """Raises ConfigError for options that do not go together."""
    if ranks is not None and shards is not None:
        raise ConfigError(
            "got --ranks and --shards: a shard server has --ranks, a ranker --shards; start one of each kind"
        )
    if shards is None and missing is not None:
        raise ConfigError("--missing-shards says what a ranker does: give --shards shards.json with it")
    if shards is not None and device is not Device.cpu:
        raise ConfigError(f"--device {device.value}: a ranker's rows are on its shards, and its dense part on the CPU")
    odd = [
        name
        for name, given in (
            ("--http-port", http_port is not None),
            ("--workers", workers > 1),
            ("--admin", admin),
            ("--device cuda", device is not Device.cpu),
        )
        if given
    ]
    if ranks is not None and odd:
        raise ConfigError(f"{', '.join(odd)}: a shard server answers rankers alone; give it to the ranker")
