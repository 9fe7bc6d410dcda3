"""``recinfer serve``: serves archives over gRPC and HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from recinfer import env
from recinfer.cli.console import Output, debugging, styled
from recinfer.cli.declared import takes
from recinfer.cli.interrupts import end_at_hangup
from recinfer.cli.serve_options import ServeOptions
from recinfer.serving.config import ServeConfig
from recinfer.serving.server.http_protocols import HTTP_PROTOCOLS
from recinfer.serving.wire.address import join_address

if TYPE_CHECKING:
    from recinfer.serving.app.service import Ready

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "serve"
EXAMPLE = "Example: recinfer serve movielens.rqa --port 8500"


@takes(ServeOptions)
def run(options: ServeOptions) -> None:
    """Serve embedding lookups and predictions of one or more archives over gRPC and REST.

    The gRPC port serves recinfer's own protocol, the Open Inference Protocol (KServe v2), the health service and
    reflection. --http-port adds REST.

    On Ctrl-C or SIGTERM the server finishes the requests in flight and exits.
    """
    from recinfer.serving.server.tuning import raise_open_files

    env.keep_grpc_quiet()
    env.share_heaps()
    raise_open_files()
    config = options.config()
    if not config.reloads:
        end_at_hangup()

    from recinfer.serving.app.run import serve_until_signal

    output = Output(options.as_json, logs=config.address.log_json, must_write=False)

    def report(text: str) -> None:
        """Print a line about the server that runs, with its time as in the log; lines of JSON have theirs."""
        now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        output.note(text if output.logs else f"{now} {text}")

    def ready(found: Ready) -> None:
        if not options.worker:  # otherwise the supervisor prints it once for all workers
            _show(found, config, output)
        payload = dataclasses.asdict(found)
        payload.pop("held", None)
        if config.models.workers > 1 and not options.worker:
            payload["workers"] = config.models.workers
        output.finish(payload)

    serve_until_signal(config, on_ready=ready, report=report, worker=options.worker, debug=debugging())
    if not options.worker:
        output.note("stopped")


def _show(ready: Ready, config: ServeConfig, output: Output) -> None:
    """Print the content of the server and its addresses."""
    from recinfer.serving.app.service import ReadyRanks

    tls = config.security.tls_cert is not None
    if isinstance(ready, ReadyRanks):
        ranks, held = ", ".join(map(str, ready.ranks)), ", ".join(ready.held) or "no version yet"
        what = f"ranks {ranks} of {held}"
        _show_addresses(output, what, ready.host, ready.port, metrics_port=ready.metrics_port, tls=tls)
        return
    what, workers = ", ".join(ready.serving), config.models.workers
    _show_addresses(
        output,
        what if workers == 1 else f"{what} in {workers} processes",
        ready.host,
        ready.port,
        # A ranker says later that it serves: it has no rows yet.
        does="serving" if config.role.shards is None else "listening for",
        http_port=ready.http_port,
        metrics_port=ready.metrics_port,
        unix_socket=ready.unix_socket,
        tls=tls,
        engines=ready.engines,
    )


def _show_addresses(
    output: Output,
    what: str,
    host: str,
    port: int,
    *,
    does: str = "serving",
    http_port: int | None = None,
    metrics_port: int | None = None,
    unix_socket: str | None = None,
    tls: bool = False,
    engines: Sequence[str] = (),
) -> None:
    """Print what is served, after ``does``, and one line per port with an address to copy, then one per engine of a dense part."""
    secure = "s" if tls else ""
    output.show(styled("green", does, f" {what} on {join_address(host, port)}  (Ctrl-C stops)"))
    if unix_socket is not None:
        output.show(f"gRPC also on unix:{unix_socket}")
    if http_port is not None:
        names = ", ".join([*(known.name for known in HTTP_PROTOCOLS), "/docs"])
        output.show(f"REST ({names}) over HTTP{secure.upper()} on {join_address(host, http_port)}")
    if metrics_port is not None:
        output.show(f"status page on http{secure}://{join_address(host, metrics_port)}/")
    for engine in engines:
        output.show(engine)
