"""``recinfer bench serve``: load on a running server, as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.console import JsonOption, Output, verb

if TYPE_CHECKING:
    from recinfer.serving.bench import LoadResult

__all__ = ["EXAMPLE", "NAME", "app", "serve"]

NAME = "bench"
EXAMPLE = "Example: recinfer bench serve --target 127.0.0.1:8500 --concurrency 1,8,32 --duration 5"

app = typer.Typer(help="Measure a running server.", no_args_is_help=True, rich_markup_mode="rich")

_PERCENTILES = (50, 90, 99, 99.9)


def serve(
    target: Annotated[str, typer.Option(help="HOST:PORT of the server.", show_default=False)],
    concurrency: Annotated[str, typer.Option(help="Callers at a time; several, with commas, one after another.")] = "1",
    duration: Annotated[float, typer.Option(min=0.01, help="Seconds for each.")] = 5.0,
    call: Annotated[str, typer.Option(help="lookup or predict.")] = "lookup",
    batch: Annotated[int, typer.Option(min=1, help="Samples a request.")] = 1,
    ids: Annotated[int, typer.Option(min=0, help="Ids for each sample and feature.")] = 1,
    model: Annotated[str, typer.Option(help="Model; without it the server's default.", show_default=False)] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token; without it RECINFER_TOKEN.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the latency curves here (png, svg, pdf).", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a running server for random ids of its features, as fast as it answers, and show latency and throughput.

    Each caller asks again as soon as it is answered. Run it on another machine, or at least beside a server that has
    cores to itself: the client needs some too.
    """
    from recinfer.serving.bench import measure_load

    output = Output(as_json)
    results = measure_load(
        target,
        call=call,  # type: ignore[arg-type]
        concurrency=_levels(concurrency),
        duration=duration,
        batch=batch,
        ids=ids,
        model=model,
        token=_token(token_file),
    )
    output.show(_table(f"{call} of {batch} samples, {ids} ids a feature, {target}", results))
    if plot is not None:
        from recinfer.cli.plot_latency import plot_latency

        plot_latency(results, plot)
        output.note(f"wrote {plot}")
    output.finish({"target": target, "call": call, "batch": batch, "ids": ids, "levels": [_plain(r) for r in results]})


app.command(name="serve", epilog=EXAMPLE)(verb(serve))


def _levels(text: str) -> list[int]:
    from recinfer.errors import InputError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--concurrency: got {text!r}, expected whole numbers with commas, as in 1,8,32") from None


def _token(path: Path | None) -> str:
    from recinfer import env

    return path.read_text().strip() if path is not None else env.token() or ""


def _table(title: str, results: list[LoadResult]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("callers", "requests/s", "samples/s", *(f"p{percent:g} ms" for percent in _PERCENTILES), "errors"):
        table.add_column(name, justify="right")
    for result in results:
        errors = ", ".join(f"{count} {name}" for name, count in sorted(result.errors.items())) or "0"
        table.add_row(
            str(result.concurrency),
            f"{result.rate:,.0f}",
            f"{result.rate * result.batch:,.0f}",
            *(f"{result.percentile(percent) * 1e3:.3f}" for percent in _PERCENTILES),
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
    }
