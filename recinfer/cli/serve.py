"""``recinfer serve``: an archive behind a gRPC port."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recinfer import env
from recinfer.cli.console import JsonOption, Output
from recinfer.cli.options import Device
from recinfer.cli.workers import stop_with_parent, supervise
from recinfer.errors import ConfigError

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "serve"
EXAMPLE = "Example: recinfer serve movielens.rqa --port 8500"


def run(
    archive: Annotated[Path, typer.Argument(help="Archive folder.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one and prints it.")] = 8500,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    device: Annotated[Device, typer.Option(help="Where lookups run; cuda puts rank r on GPU r.")] = Device.cpu,
    http_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Also the Open Inference Protocol's REST form, on this TCP port."),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Prometheus metrics, and at / a page for people.")
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log to stderr as JSON, one line a request with its id.")
    ] = False,
    preload: Annotated[bool, typer.Option("--preload", help="Read all pages before the first request.")] = False,
    lock: Annotated[bool, typer.Option("--lock", help="Also keep them in memory (mlock).")] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port and the archive.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples that requests may share a run with.")] = 1024,
    max_delay_us: Annotated[
        int, typer.Option(min=0, help="Microseconds a request may wait for others while the server is busy.")
    ] = 0,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused at once.")] = 512,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token of all calls; RECINFER_TOKEN does the same.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority of clients' certificates (mutual TLS).")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve lookups and predictions of an archive over gRPC, with health and reflection.

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
    if workers > 1 and not worker:
        if metrics_port is not None:
            raise ConfigError("metrics_port: got one port for several workers; leave out --metrics-port or --workers")
        supervise(workers, host, port, Output(as_json))
        return
    from recinfer.inference.predictor import load
    from recinfer.serving.batcher import BatchConfig
    from recinfer.serving.observe import log_as_json
    from recinfer.serving.server import serve

    if log_json:
        log_as_json()

    output = Output(as_json)
    predictor = load(archive, device=device.value, preload=preload, lock=lock)
    manifest = predictor.manifest

    def ready(bound: int) -> None:
        output.show(f"[green]serving[/green] {manifest.model} {manifest.version} on {host}:{bound}  (Ctrl-C stops)")
        if http_port is not None:
            output.show(f"Open Inference Protocol over HTTP on {host}:{http_port}")
        if metrics_port is not None:
            output.show(f"status page on http://{host}:{metrics_port}/")
        output.finish(
            {
                "model": manifest.model,
                "version": manifest.version,
                "host": host,
                "port": bound,
                "http_port": http_port,
                "metrics_port": metrics_port,
            }
        )

    serve(
        {manifest.model: predictor},
        host=host,
        port=port,
        http_port=http_port,
        batching=BatchConfig(max_batch=max_batch, max_delay_us=max_delay_us, max_queue=max_queue),
        security=security,
        share_port=worker,
        stop=stop_with_parent() if worker else None,
        metrics_port=metrics_port,
        on_ready=ready,
    )
    output.note("stopped")
