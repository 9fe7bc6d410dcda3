"""``recinfer bench``: measures latency and throughput of a running server, as a table and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli import bench_capacity
from recinfer.cli.client import ClientOptions, TargetOption, client_arguments, open_client
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, verb
from recinfer.cli.declared import takes
from recinfer.cli.options import check_picture
from recinfer.printed import slim_table

if TYPE_CHECKING:
    from recinfer.serving.bench import LoadResult

__all__ = ["EXAMPLE", "NAME", "BenchServeOptions", "app", "serve"]

NAME = "bench"
EXAMPLE = (
    "Example: recinfer bench serve --target 127.0.0.1:8500 --concurrency 1,8,32 --duration 5\n\n"
    "With TLS and a token: recinfer bench serve --target rankers.example:8500 --tls-ca ca.pem --token-file token.txt"
)

app = typer.Typer(
    help="Measure the latency, throughput and capacity of a server.", no_args_is_help=True, rich_markup_mode="rich"
)

_PERCENTILES = (50, 90, 99, 99.9)


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """The options of ``recinfer bench serve``."""

    target: TargetOption
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            help="Number of concurrent callers; several numbers, separated by commas, are measured one after another.",
        ),
    ] = "1"
    duration: Annotated[float, typer.Option("--duration", min=0.01, help="Seconds of load per number of callers.")] = (
        5.0
    )
    call: Annotated[str, typer.Option("--call", help="Kind of request: lookup or predict.")] = "lookup"
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples per request.")] = 1
    ids: Annotated[int, typer.Option("--ids", min=0, help="Ids per sample and feature.")] = 1
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Plot the latency curves to this file (png, svg, pdf).", show_default=False),
    ] = None
    client: ClientOptions
    as_json: JsonOption = False


@takes(BenchServeOptions)
def serve(options: BenchServeOptions) -> None:
    """Load a running server with random ids and show latency and throughput.

    Each caller sends its next request when it receives a response. A request that takes longer than --timeout counts as
    an error. Exit code 1: every request failed. Run the command on another machine than the server, or give the server
    its own cores.
    """
    from recinfer.serving.bench import measure_load

    output = Output(options.as_json)
    levels = _levels(options.concurrency)
    if options.plot is not None:
        check_picture(options.plot)
    if options.client.wait:
        open_client(options.target, options.client).close()
    results = measure_load(
        options.target,
        call=options.call,  # type: ignore[arg-type]
        concurrency=levels,
        duration=options.duration,
        batch=options.batch,
        ids=options.ids,
        **client_arguments(options.client),
    )
    what = {name: getattr(options, name) for name in ("target", "call", "batch", "ids")}
    output.show(_table("{call} of {batch} samples, {ids} ids per feature, {target}".format(**what), results))
    reasons = {name: reason for result in reversed(results) for name, reason in result.reasons.items()}
    for name, reason in sorted(reasons.items()):
        output.show(f"the first {name}: {reason}")
    if options.plot is not None:
        from recinfer.cli.plot_latency import plot_latency

        plot_latency(results, options.plot)
        output.note(f"wrote {options.plot}")
    output.finish({**what, "levels": [_plain(result) for result in results]})
    if not any(result.latencies.size for result in results):
        raise typer.Exit(EXIT_FAILED_CHECK)


app.command(name="serve", epilog=EXAMPLE)(verb(serve))
app.command(name="capacity", epilog=bench_capacity.EXAMPLE)(verb(bench_capacity.capacity))


def _levels(text: str) -> list[int]:
    from recinfer.errors import InputError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--concurrency: got {text!r}, expected whole numbers separated by commas, as in 1,8,32"
        ) from None


def _table(title: str, results: list[LoadResult]) -> Any:
    numbers = ("callers", "requests/s", "samples/s", *(f"p{percent:g} ms" for percent in _PERCENTILES))
    table = slim_table(*numbers, "errors", numbers=numbers, title=title)
    for result in results:
        errors = ", ".join(f"{count} {name}" for name, count in sorted(result.errors.items())) or "0"
        table.add_row(
            str(result.concurrency),
            f"{result.rate:,.0f}",
            f"{result.rate * result.batch:,.0f}",
            *(f"{result.percentile(percent) * 1e3:.3f}" if result.latencies.size else "-" for percent in _PERCENTILES),
            errors,
        )
    return table


def _plain(result: LoadResult) -> dict[str, Any]:
    return {
        "concurrency": result.concurrency,
        "requests": int(result.latencies.size),
        "rate": result.rate,
        **{f"p{percent:g}_ms": result.percentile(percent) * 1e3 for percent in _PERCENTILES},
        "errors": result.errors,
        "reasons": result.reasons,
    }
