"""``recinfer size``: how many hosts of which kind a load needs, what it costs, by simulating the candidates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from recinfer.cli.console import EXIT_FAILED_CHECK, Output
from recinfer.cli.declared import takes
from recinfer.cli.size_options import AskedCall, CandidateOptions, LoadOptions, ServerOptions, SizeOptions
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.archive.reader import Archive
    from recinfer.distributed.planner.calibration import HardwareProfile
    from recinfer.sizing.arrivals import Trace
    from recinfer.sizing.costs import ServingCosts
    from recinfer.sizing.hosts import HostType
    from recinfer.sizing.search import Candidate, Goal, Settings
    from recinfer.sizing.workload import Model

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "size"
EXAMPLE = "Example: recinfer size --archive movielens.rqa --qps 20000 --p99-ms 10"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Question:
    """What is searched for, and all that the simulation needs to know."""

    goal: Goal
    arrivals: Trace
    model: Model
    costs: ServingCosts
    hosts: Sequence[HostType]
    precisions: list[str]
    settings: Settings
    hardware: HardwareProfile | None


@takes(SizeOptions)
def run(options: SizeOptions) -> None:
    """Find the cheapest deployment that answers so many requests a second in time: shards, replicas, rankers, precision.

    Queues, merged runs, fan-out, hedging and stragglers are simulated request by request with measured costs. Nothing
    is started. Exit code 1: none of the candidates keeps the promise.
    """
    from recinfer.sizing.arrivals import write_trace
    from recinfer.sizing.report import as_data, check_picture, check_place

    output, started = Output(options.as_json), time.perf_counter()
    if options.plot is not None:
        check_picture(options.plot)
    if options.write_trace is not None:
        check_place("--write-trace", options.write_trace)
    asked = _question(options)
    goal = asked.goal
    with output.bar("sizing") as progress:
        found = _search(asked, options, progress)
        best = found[0] if found[0].meets else None
        if options.plot is not None and best is not None:
            _draw(options.plot, best, asked, options.seed, progress)
    if options.write_trace is not None:
        write_trace(asked.arrivals.at_rate(goal.qps, options.requests, options.seed), options.write_trace)
    _show(output, found, goal, asked.model)
    _show_what_is_assumed(output, options.candidates, asked)
    if options.plot is not None and best is not None:
        output.note(f"wrote {options.plot}")
    output.finish(
        {
            "qps": goal.qps,
            "p99_ms": options.load.p99_ms,
            "chosen": None if best is None else as_data(best),
            "candidates": [as_data(c) for c in found],
            "seconds": time.perf_counter() - started,
        }
    )
    if best is None:
        raise typer.Exit(EXIT_FAILED_CHECK)


def _question(options: SizeOptions) -> _Question:
    """What the options ask; raises ConfigError, and the errors of the files that they name."""
    from recinfer.archive.reader import open_archive
    from recinfer.distributed.planner.calibration import HardwareProfile
    from recinfer.sizing.arrivals import read_trace
    from recinfer.sizing.costs import ServingCosts
    from recinfer.sizing.hosts import EXAMPLE_HOSTS, priced, read_hosts
    from recinfer.sizing.search import Goal
    from recinfer.sizing.typical import TYPICAL_COSTS

    load, given = options.load, options.candidates
    trace = read_trace(load.trace) if load.trace is not None else None
    qps = load.qps if load.qps is not None else None if trace is None else trace.qps
    if qps is None:
        raise ConfigError("--qps: give the requests a second, or a --trace that has them")
    hosts = priced(read_hosts(given.hosts) if given.hosts is not None else EXAMPLE_HOSTS, given.price or [])
    costs = ServingCosts.load(given.serving) if given.serving is not None else TYPICAL_COSTS
    hardware = HardwareProfile.load(given.hardware) if given.hardware is not None else None
    archive = open_archive(load.archive)
    goal = Goal(qps, load.p99_ms / 1e3)
    model, arrivals = _load_of(archive, load, trace, goal.qps, options.requests, options.seed)
    chosen = [p.value for p in given.precision] if given.precision else [archive.manifest.precision, "int8", "int4"]
    settings = _settings(options.servers, given)
    return _Question(goal, arrivals, model, costs, hosts, list(dict.fromkeys(chosen)), settings, hardware)


def _settings(servers: ServerOptions, candidates: CandidateOptions) -> Settings:
    from recinfer.serving.batcher import BatchConfig
    from recinfer.sizing.ranker import Hedging
    from recinfer.sizing.search import Settings
    from recinfer.sizing.servers import Network
    from recinfer.sizing.simulate import Stragglers

    return Settings(
        batching=BatchConfig(
            max_batch=servers.max_batch, max_delay_us=servers.max_delay_us, max_queue=servers.max_queue
        ),
        network=Network(servers.network_us * 1e-6, servers.network_gbps * 1.25e8),
        stragglers=Stragglers(servers.straggler_share, servers.straggler_ms * 1e-3),
        hedging=Hedging(servers.hedge_budget),
        min_replicas=candidates.min_replicas,
        max_hosts=candidates.max_hosts,
    )


def _load_of(
    archive: Archive, load: LoadOptions, trace: Trace | None, qps: float, requests: int, seed: int
) -> tuple[Model, Trace]:
    """The model as asked, and the requests that come."""
    from recinfer.sizing.arrivals import poisson
    from recinfer.sizing.workload import Model, measure_dense

    manifest = archive.manifest
    features = list(manifest.feature_tables)
    predicts = manifest.dense is not None if load.call is None else load.call is AskedCall.predict
    dense = measure_dense(archive) if predicts else None
    if trace is None:
        model = Model.of(manifest, dict.fromkeys(features, load.ids), dense)
        return model, poisson(qps, requests, batch=load.batch, ids_per_sample=model.ids_per_sample, seed=seed)
    unknown = sorted(set(trace.ids_by_feature) - set(features))
    if unknown:
        raise ConfigError(
            f"--trace: the model has no feature {', '.join(unknown[:5])}; it has {', '.join(features[:20])}"
        )
    by_feature = dict(trace.ids_by_feature) or dict.fromkeys(features, trace.ids_per_sample / len(features))
    return Model.of(manifest, {name: by_feature.get(name, 0.0) for name in features}, dense), trace


def _search(asked: _Question, options: SizeOptions, progress: Progress) -> list[Candidate]:
    from recinfer.sizing.search import search

    return search(
        asked.goal,
        asked.arrivals,
        asked.model,
        asked.costs,
        hosts=asked.hosts,
        precisions=asked.precisions,
        shard_counts=options.candidates.shards or (),
        settings=asked.settings,
        hardware=asked.hardware,
        requests=options.requests,
        seed=options.seed,
        progress=progress,
    )


def _draw(path: Path, best: Candidate, asked: _Question, seed: int, progress: Progress) -> None:
    from recinfer.sizing.report import picture
    from recinfer.sizing.search import latency_curve

    curve = latency_curve(
        best,
        asked.goal,
        asked.arrivals,
        asked.model,
        asked.costs,
        settings=asked.settings,
        hardware=asked.hardware,
        seed=seed,
        progress=lambda done, total: progress("drawing", done, total),
    )
    picture(curve, asked.goal, _said(best), path)


def _said(best: Candidate) -> str:
    d = best.deployment
    assert d is not None
    if not d.rankers:
        what = f"{d.replicas} {best.host.name} hosts, each with all tables"
    else:
        what = f"{d.shards} shards x {d.replicas} replicas and {d.rankers} rankers on {best.host.name} hosts"
    return f"{what}, {best.precision}, {d.workers} workers a host"


def _show(output: Output, found: list[Candidate], goal: Goal, model: Model) -> None:
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
        fastest = min((c.p99_s for c in found if math.isfinite(c.p99_s)), default=None)
        said = "why is in the last column" if fastest is None else f"the fastest has a p99 of {fastest * 1e3:.2f} ms"
        output.show(f"[bold red]no candidate keeps it[/bold red]; {said}")


def _show_what_is_assumed(output: Output, given: CandidateOptions, asked: _Question) -> None:
    from recinfer.serving.limits import Limits

    largest, taken = int(asked.arrivals.batches.max()), Limits().max_batch
    if largest > taken:
        output.note(f"servers take {taken:,} samples a request unless told: recinfer serve --max-samples {largest}")
    if given.serving is None:
        output.note("costs of calls are typical ones; measure yours: recinfer calibrate --serving serving.json")
    priced = {text.partition("=")[0] for text in given.price or []}
    made_up = [] if given.hosts is not None else [host.name for host in asked.hosts if host.name not in priced]
    if made_up:
        whose = f" of {', '.join(made_up)}" if priced else ""
        output.note(f"prices{whose} are made up; give yours: --hosts FILE or --price NAME=PRICE")
