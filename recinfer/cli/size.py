"""``recinfer size``: how many hosts of which kind a load needs, what it costs, by simulating the candidates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output
from recinfer.cli.options import Precision
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.archive.reader import Archive
    from recinfer.sizing.arrivals import Trace
    from recinfer.sizing.search import Candidate, Goal
    from recinfer.sizing.workload import Model

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "size"
EXAMPLE = "Example: recinfer size --archive movielens.rqa --qps 20000 --p99-ms 10"


class AskedCall(StrEnum):
    """What requests ask for."""

    lookup = "lookup"
    predict = "predict"


def run(
    archive: Annotated[Path, typer.Option("--archive", help="Archive folder: the model to serve.")],
    p99_ms: Annotated[float, typer.Option("--p99-ms", min=0.01, help="99 % of requests are answered within this.")],
    qps: Annotated[float | None, typer.Option(min=0.1, help="Requests a second.", show_default="the trace's")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="When requests come and how large they are: JSON lines or CSV; see docs/sizing.md."),
    ] = None,
    call: Annotated[
        AskedCall | None, typer.Option(help="What requests ask for.", show_default="predict, if the model can")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples a request, without a trace.")] = 1,
    ids: Annotated[float, typer.Option(min=0, help="Ids a sample and feature, without a trace.")] = 1.0,
    hosts: Annotated[
        Path | None, typer.Option(help="Kinds of hosts with their prices (JSON).", show_default="made-up ones")
    ] = None,
    price: Annotated[list[str] | None, typer.Option(metavar="NAME=PRICE", help="Price of a kind; repeatable.")] = None,
    precision: Annotated[
        list[Precision] | None,
        typer.Option(help="Element types that may be chosen; repeatable.", show_default="the archive's, int8, int4"),
    ] = None,
    shards: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of shards to try; repeatable.")] = None,
    min_replicas: Annotated[int, typer.Option(min=1, help="Hosts of every kind, so that some may be lost.")] = 2,
    max_hosts: Annotated[int, typer.Option(min=1, help="Of a deployment.")] = 1000,
    serving: Annotated[
        Path | None, typer.Option(help="Costs of calls: `recinfer calibrate --serving`.", show_default="typical")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="Costs of lookups: `recinfer calibrate --out`.", show_default="typical")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="As of `recinfer serve`.")] = 1024,
    max_delay_us: Annotated[int, typer.Option(min=0, help="As of `recinfer serve`.")] = 4000,
    max_queue: Annotated[int, typer.Option(min=1, help="As of `recinfer serve`.")] = 512,
    network_us: Annotated[float, typer.Option(min=0, help="Microseconds one way between hosts.")] = 100.0,
    network_gbps: Annotated[float, typer.Option(min=0.001, help="Gigabits a second of a host.")] = 10.0,
    straggler_share: Annotated[float, typer.Option(min=0, max=1, help="Share of shards' answers that are late.")] = 0.0,
    straggler_ms: Annotated[float, typer.Option(min=0, help="By how much, on average.")] = 20.0,
    hedge_budget: Annotated[
        float, typer.Option(min=0, max=1, help="Share of calls that are sent twice; 0: none.")
    ] = 0.1,
    requests: Annotated[int, typer.Option(min=500, help="Simulated for each answer.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw p99 against the rate here.")
    ] = None,
    write_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the requests that were simulated, as a trace.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the cheapest deployment that answers so many requests a second in time: shards, replicas, rankers, precision.

    Queues, merged runs, fan-out, hedging and stragglers are simulated request by request with measured costs. Nothing
    is started. Exit code 1: none of the candidates keeps the promise.
    """
    from recinfer.archive.reader import open_archive
    from recinfer.distributed.planner.calibration import HardwareProfile
    from recinfer.serving.batcher import BatchConfig
    from recinfer.sizing.arrivals import read_trace
    from recinfer.sizing.arrivals import write_trace as write
    from recinfer.sizing.costs import ServingCosts
    from recinfer.sizing.hosts import EXAMPLE_HOSTS, priced, read_hosts
    from recinfer.sizing.ranker import Hedging
    from recinfer.sizing.report import as_data, check_picture
    from recinfer.sizing.search import Goal, Settings, search
    from recinfer.sizing.servers import Network
    from recinfer.sizing.simulate import Stragglers
    from recinfer.sizing.typical import TYPICAL_COSTS

    output, started = Output(as_json), time.perf_counter()
    if plot is not None:
        check_picture(plot)
    read = read_trace(trace) if trace is not None else None
    if qps is None and read is None:
        raise ConfigError("--qps: give the requests a second, or a --trace that has them")
    kinds = priced(read_hosts(hosts) if hosts is not None else EXAMPLE_HOSTS, price or [])
    costs = ServingCosts.load(serving) if serving is not None else TYPICAL_COSTS
    profile = HardwareProfile.load(hardware) if hardware is not None else None
    opened = open_archive(archive)
    goal = Goal(qps if qps is not None else _rate(read), p99_ms / 1e3)
    model, arrivals = _load_of(opened, call, read, goal.qps, batch, ids, requests, seed)
    chosen = [p.value for p in precision] if precision else [opened.manifest.precision, "int8", "int4"]
    settings = Settings(
        batching=BatchConfig(max_batch=max_batch, max_delay_us=max_delay_us, max_queue=max_queue),
        network=Network(network_us * 1e-6, network_gbps * 1.25e8),
        stragglers=Stragglers(straggler_share, straggler_ms * 1e-3),
        hedging=Hedging(hedge_budget),
        min_replicas=min_replicas,
        max_hosts=max_hosts,
    )
    with _bar(output) as progress:
        found = search(
            goal,
            arrivals,
            model,
            costs,
            hosts=kinds,
            precisions=list(dict.fromkeys(chosen)),
            shard_counts=shards or (),
            settings=settings,
            hardware=profile,
            requests=requests,
            seed=seed,
            progress=progress,
        )
        best = found[0] if found[0].meets else None
        if plot is not None and best is not None:
            _draw(plot, best, goal, arrivals, model, costs, settings, profile, seed, progress)
    if write_trace is not None:
        write(arrivals.at_rate(goal.qps, requests, seed), write_trace)
    _show(output, found, goal, model, costs is TYPICAL_COSTS, hosts is None and not price)
    if plot is not None and best is not None:
        output.note(f"wrote {plot}")
    output.finish(
        {
            "qps": goal.qps,
            "p99_ms": p99_ms,
            "chosen": None if best is None else as_data(best),
            "candidates": [as_data(c) for c in found],
            "seconds": time.perf_counter() - started,
        }
    )
    if best is None:
        raise typer.Exit(EXIT_FAILED_CHECK)


def _rate(trace: Trace | None) -> float:
    assert trace is not None
    return trace.qps


def _load_of(
    archive: Archive,
    call: AskedCall | None,
    trace: Trace | None,
    qps: float,
    batch: int,
    ids: float,
    requests: int,
    seed: int,
) -> tuple[Model, Trace]:
    """The model as asked, and the requests that come."""
    from recinfer.sizing.arrivals import poisson
    from recinfer.sizing.workload import Model, measure_dense

    manifest = archive.manifest
    features = list(manifest.feature_tables)
    predicts = manifest.dense is not None if call is None else call is AskedCall.predict
    dense = measure_dense(archive) if predicts else None
    if trace is None:
        model = Model.of(manifest, dict.fromkeys(features, ids), dense)
        return model, poisson(qps, requests, batch=batch, ids_per_sample=model.ids_per_sample, seed=seed)
    unknown = sorted(set(trace.ids_by_feature) - set(features))
    if unknown:
        raise ConfigError(
            f"--trace: the model has no feature {', '.join(unknown[:5])}; it has {', '.join(features[:20])}"
        )
    by_feature = dict(trace.ids_by_feature) or dict.fromkeys(features, trace.ids_per_sample / len(features))
    return Model.of(manifest, {name: by_feature.get(name, 0.0) for name in features}, dense), trace


@contextmanager
def _bar(output: Output) -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output.progress, transient=True) as bar:
        task = bar.add_task("sizing", total=1)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _draw(
    path: Path,
    best: Candidate,
    goal: Goal,
    trace: Trace,
    model: Model,
    costs: Any,
    settings: Any,
    hardware: Any,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> None:
    from recinfer.sizing.report import picture
    from recinfer.sizing.search import latency_curve

    curve = latency_curve(
        best,
        goal,
        trace,
        model,
        costs,
        settings=settings,
        hardware=hardware,
        seed=seed,
        progress=lambda done, total: progress("drawing", done, total),
    )
    picture(curve, goal, _said(best), path)


def _said(best: Candidate) -> str:
    d = best.deployment
    assert d is not None
    if not d.rankers:
        what = f"{d.replicas} {best.host.name} hosts, each with all tables"
    else:
        what = f"{d.shards} shards x {d.replicas} replicas and {d.rankers} rankers on {best.host.name} hosts"
    return f"{what}, {best.precision}, {d.workers} workers a host"


def _show(output: Output, found: list[Candidate], goal: Goal, model: Model, typical: bool, made_up: bool) -> None:
    from rich.table import Table

    from recinfer.sizing.report import COLUMNS, rows

    kind = "Predict" if model.predicts else "Lookup"
    title = f"{goal.qps:,.0f} {kind} a second of {model.manifest.model}, p99 within {goal.p99_s * 1e3:g} ms"
    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    shown = rows(found)
    for at, row in enumerate(shown):
        style = "bold green" if not at and found[0].meets else "dim" if not found[at].meets else ""
        table.add_row(*row, style=style)
    output.show(table)
    if len(found) > len(shown):
        output.note(f"{len(found) - len(shown)} more candidates are in --json")
    best = found[0]
    if best.meets:
        margin = goal.p99_s / best.p99_s
        output.show(
            f"[bold green]{_said(best)}[/bold green]: p50 {best.p50_s * 1e3:.2f} ms, p99 {best.p99_s * 1e3:.2f} ms, "
            f"{best.cost:,.2f} an hour"
            + (" (little room: the simulation is good to about 30 %)" if margin < 1.3 else "")
        )
        if best.precision != model.manifest.precision:
            output.note(
                f"the archive has {model.manifest.precision}: export it in {best.precision}, and look at quality"
            )
    else:
        fastest = min((c.p99_s for c in found if math.isfinite(c.p99_s)), default=math.nan)
        output.show(f"[bold red]no candidate keeps it[/bold red]; the fastest has a p99 of {fastest * 1e3:.2f} ms")
    if typical:
        output.note("costs of calls are typical ones; measure yours: recinfer calibrate --serving serving.json")
    if made_up:
        output.note("prices are made up; give yours: --hosts FILE or --price NAME=PRICE")
