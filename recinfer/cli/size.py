"""``recinfer size``: how many hosts of which kind a rate needs, and what they cost, from measured capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recinfer.cli.bench_capacity import Asked, LoadOptions, as_data, measure, show_measured
from recinfer.cli.client import ClientOptions
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output
from recinfer.cli.declared import takes
from recinfer.cli.options import RequestKind
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.archive.manifest import Manifest
    from recinfer.sizing.capacity import Measured
    from recinfer.sizing.deployment import Deployment, Goal
    from recinfer.sizing.hosts import HostType

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "size"
EXAMPLE = (
    "Example: recinfer size --archive movielens.rqa --qps 20000 --p99-ms 10\n\n"
    "With an earlier measurement: recinfer size --archive movielens.rqa --qps 20000 --capacity capacity.json"
)


@dataclass(frozen=True)
class HostOptions:
    """The available hosts and their prices."""

    hosts: Annotated[
        Path | None, typer.Option(help="Kinds of hosts with their prices (JSON).", show_default="made-up ones")
    ] = None
    price: Annotated[list[str] | None, typer.Option(metavar="NAME=PRICE", help="Price of a kind; repeatable.")] = None
    shards: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the plan.", show_default="as many as the memory needs")
    ] = None
    min_replicas: Annotated[
        int, typer.Option(min=1, help="Minimum replicas of each server, so that some may fail.")
    ] = 2
    max_hosts: Annotated[int, typer.Option(min=1, help="Most hosts of a deployment.")] = 1000


@dataclass(frozen=True)
class SizeOptions:
    """All options of the command."""

    hosts: HostOptions
    archive: Annotated[Path, typer.Option("--archive", help="Archive folder: the model to serve.")]
    qps: Annotated[float | None, typer.Option(min=0.1, help="Requests per second.", show_default="the trace's")] = None
    p99_ms: Annotated[
        float | None,
        typer.Option(
            "--p99-ms", min=0.01, help="The latency objective for 99 % of requests.", show_default="that of --capacity"
        ),
    ] = None
    capacity: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of `recinfer bench capacity --out`; repeatable: one of a server, one of a ranker and shard.",
            show_default="measured now",
        ),
    ] = None
    trace: Annotated[Path | None, typer.Option(help="Trace of arrival times and request sizes.")] = None
    call: Annotated[
        RequestKind | None, typer.Option(help="Kind of requests.", show_default="predict, if the model can")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples per request, without a trace.")] = 1
    ids: Annotated[float, typer.Option(min=0, help="Ids per sample and feature, without a trace.")] = 1.0
    seconds: Annotated[float, typer.Option(min=0.2, help="Length of one stretch of load, if capacity is measured.")] = (
        3.0
    )
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the measured p50 and p99 against the rate.")
    ] = None
    as_json: JsonOption = False


@takes(SizeOptions)
def run(options: SizeOptions) -> None:
    """Compute how many hosts of which kind a request rate needs, and their price.

    The planner computes how many ranks the memory needs. Capacity is measured: a real server is loaded until it misses
    the objective (`recinfer bench capacity`), and hosts are planned for 70 % of that rate. Only the latency of several
    shards together is computed. Exit code 1: no kind of host meets the objective.
    """
    from recinfer.archive.reader import open_archive
    from recinfer.sizing.deployment import deployment
    from recinfer.sizing.hosts import EXAMPLE_HOSTS, priced, read_hosts
    from recinfer.sizing.report import as_data as as_row
    from recinfer.sizing.report import check_picture, draw_curve

    output, given = Output(options.as_json), options.hosts
    if options.plot is not None:
        check_picture(options.plot)
    hosts = priced(read_hosts(given.hosts) if given.hosts is not None else EXAMPLE_HOSTS, given.price or [])
    manifest = open_archive(options.archive, ranks=()).manifest
    server, sharded = _read(options, manifest)
    goal = _goal(options, server or sharded)
    if not options.capacity:
        server, sharded = _measured_now(options, goal, manifest, hosts, output)
    found = [
        deployment(manifest, host, goal, server, sharded, shards=given.shards, max_hosts=given.max_hosts)
        for host in hosts
    ]
    found.sort(key=lambda each: (not each.meets, each.cost or math.inf, each.hosts))
    _show(output, found, goal, [each for each in (server, sharded) if each is not None])
    _show_what_is_assumed(output, given, hosts, found, sharded)
    if options.plot is not None and (drawn := server or sharded) is not None:
        draw_curve(drawn, options.plot)
        output.note(f"wrote {options.plot}")
    best = found[0] if found[0].meets else None
    output.finish(
        {
            "qps": goal.qps,
            "p99_ms": goal.p99_s * 1e3,
            "chosen": None if best is None else as_row(best),
            "deployments": [as_row(each) for each in found],
            "measured": [as_data(each) for each in (server, sharded) if each is not None],
        }
    )
    if best is None:
        raise typer.Exit(EXIT_FAILED_CHECK)


def _read(options: SizeOptions, manifest: Manifest) -> tuple[Measured | None, Measured | None]:
    """The measurements in --capacity: of a server, and of a ranker and shard."""
    from recinfer.sizing.capacity import Measured

    found: dict[str, Measured] = {}
    for path in options.capacity or []:
        each = Measured.load(path)
        if each.what in found:
            raise ConfigError(f"--capacity {path}: another file measures a {each.what} too; give at most one of each")
        if each.model != manifest.model:
            raise ConfigError(
                f"--capacity {path}: it measures model {each.model}, the archive has model {manifest.model}"
            )
        if options.p99_ms is not None and not math.isclose(each.p99_s * 1e3, options.p99_ms):
            raise ConfigError(
                f"--capacity {path}: its knee is for a p99 within {each.p99_s * 1e3:g} ms, not {options.p99_ms:g}; "
                f"measure that objective: recinfer bench capacity ARCHIVE --p99-ms {options.p99_ms:g} --out FILE"
            )
        found[each.what] = each
    return found.get("server"), found.get("ranker and shard")


def _goal(options: SizeOptions, measured: Measured | None) -> Goal:
    from recinfer.sizing.arrivals import read_trace
    from recinfer.sizing.deployment import Goal

    qps = options.qps
    if qps is None and options.trace is not None:
        qps = read_trace(options.trace).qps
    if qps is None:
        raise ConfigError("--qps: give the requests per second, or a --trace that has them")
    p99_s = options.p99_ms / 1e3 if options.p99_ms is not None else None if measured is None else measured.p99_s
    if p99_s is None:
        raise ConfigError("--p99-ms: give the milliseconds within which 99 % of requests are answered")
    return Goal(qps, p99_s, options.hosts.min_replicas)


def _measured_now(
    options: SizeOptions, goal: Goal, manifest: Manifest, hosts: Sequence[HostType], output: Output
) -> tuple[Measured | None, Measured | None]:
    """Measure what the kinds of hosts need: one server, or a ranker and a shard server, or both."""
    from recinfer.distributed.planner.types import PlannerError
    from recinfer.sizing.deployment import ranks_needed

    counts = {options.hosts.shards} if options.hosts.shards is not None else set()
    for host in hosts if not counts else ():
        try:
            counts.add(ranks_needed(manifest, host))
        except PlannerError:
            continue
    load = LoadOptions(
        p99_ms=goal.p99_s * 1e3,
        trace=options.trace,
        call=options.call,
        batch=options.batch,
        ids=options.ids,
        seconds=options.seconds,
    )
    asked = Asked(options.archive)
    server = measure(asked, load, ClientOptions(), output) if 1 in counts else None
    sharded = measure(replace(asked, sharded=True), load, ClientOptions(), output) if counts - {1} else None
    for each in (server, sharded):
        if each is not None:
            show_measured(output, each)
    return server, sharded


def _show(output: Output, found: Sequence[Deployment], goal: Goal, measured: Sequence[Measured]) -> None:
    from rich.table import Table

    from recinfer.sizing.report import COLUMNS, rows

    table = Table(
        title=f"{goal.qps:,.0f} requests per second, p99 within {goal.p99_s * 1e3:g} ms", title_justify="left"
    )
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    shown = rows(found)
    for at, row in enumerate(shown):
        style = "bold green" if not at and found[0].meets else "dim" if not found[at].meets else ""
        table.add_row(*row, style=style)
    output.show(table)
    best = found[0]
    if not best.meets:
        output.show("[bold red]no kind of host meets the objective[/bold red]; the last column has the reasons")
        return
    what = f"{best.replicas} {best.host.name} hosts, each with all tables"
    if best.rankers:
        what = f"{best.shards} shards x {best.replicas} replicas and {best.rankers} rankers on {best.host.name} hosts"
    output.show(f"[bold green]{what}[/bold green]: {best.share:.0%} of the knee each, {best.cost:,.2f} per hour")
    if best.share_one_lost > 1:
        output.show("[yellow]while one host is down, the others are overloaded: increase --min-replicas[/yellow]")
    for each in measured:
        where = each.machine
        output.note(
            f"{each.what}: knee {each.knee_qps:,.0f} requests per second, measured on {where['cores']} cores of "
            f"{where['processor']}, {where['date']}"
        )


def _show_what_is_assumed(
    output: Output,
    given: HostOptions,
    hosts: Sequence[HostType],
    found: Sequence[Deployment],
    sharded: Measured | None,
) -> None:
    from recinfer.sizing.fanout import agreement

    output.note("the knee of a host is assumed to be proportional to its cores; measure on the host itself if possible")
    if any(each.shards == 1 and each.p99_s is not None for each in found):
        output.note("p99 of one shard is that of the measured server at the same share of its knee")
    if sharded is not None and sharded.service_s and any(each.shards > 1 and each.replicas for each in found):
        paper = agreement(sharded)
        said = f"p99 at {paper.qps:,.0f} requests per second: {paper.carried_s * 1e3:.2f} ms, measured {paper.measured_s * 1e3:.2f}"
        if paper.agrees:
            output.note(f"p99 of several shards is computed by a queue model, which has a {said}")
        else:
            output.note(f"no p99 of several shards: the queue model disagrees with the measurement ({said})")
    priced = {text.partition("=")[0] for text in given.price or []}
    made_up = [] if given.hosts is not None else [host.name for host in hosts if host.name not in priced]
    if made_up:
        whose = f" of {', '.join(made_up)}" if priced else ""
        output.note(f"prices{whose} are made up; pass yours with --hosts FILE or --price NAME=PRICE")
