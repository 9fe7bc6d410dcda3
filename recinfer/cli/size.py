"""``recinfer size``: computes from measured capacity how many hosts a request rate needs and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recinfer.cli.archives import local_archive
from recinfer.cli.bench_capacity import LoadOptions, MeasuredServer, as_data, measure, show_measured
from recinfer.cli.client import ClientOptions
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, styled
from recinfer.cli.declared import takes
from recinfer.cli.options import RequestKind, check_picture
from recinfer.errors import ConfigError
from recinfer.printed import slim_table

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
    """Kinds of hosts with their prices, and bounds on the deployment."""

    hosts: Annotated[
        Path | None,
        typer.Option(help="File with the kinds of hosts and their prices (JSON).", show_default="example prices"),
    ] = None
    price: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PRICE", help="Price per hour of a kind of host; repeatable.")
    ] = None
    shards: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of ranks to shard the tables over.", show_default="as many as the memory needs"
        ),
    ] = None
    min_replicas: Annotated[
        int, typer.Option(min=1, help="Fewest replicas of each server, so that the deployment survives lost hosts.")
    ] = 2
    max_hosts: Annotated[int, typer.Option(min=1, help="Most hosts in a deployment.")] = 1000


@dataclass(frozen=True)
class SizeOptions:
    """All options of ``recinfer size``."""

    hosts: HostOptions
    archive: Annotated[str, typer.Option("--archive", help="Archive folder of the model to serve, or its URL.")]
    qps: Annotated[
        float | None,
        typer.Option(min=0.1, help="Requests per second that the deployment must serve.", show_default="the trace's"),
    ] = None
    p99_ms: Annotated[
        float | None,
        typer.Option(
            "--p99-ms",
            min=0.01,
            help="Objective: 99 % of requests get a response within this many milliseconds.",
            show_default="that of --capacity",
        ),
    ] = None
    capacity: Annotated[
        list[Path] | None,
        typer.Option(
            help="File from `recinfer bench capacity --out`; repeatable: one of a server, one of a ranker and shard "
            "server.",
            show_default="measured now",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace with arrival times and sizes of requests; see the page Measure capacity."),
    ] = None
    call: Annotated[
        RequestKind | None, typer.Option(help="Kind of request.", show_default="predict, if the model has a dense part")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples per request, without --trace.")] = 1
    ids: Annotated[float, typer.Option(min=0, help="Ids per sample and feature, without --trace.")] = 1.0
    seconds: Annotated[
        float, typer.Option(min=0.2, help="Seconds of load per rate, when this command measures the capacity.")
    ] = 3.0
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Plot the measured p50 and p99 against the request rate to this file."
        ),
    ] = None
    as_json: JsonOption = False


@takes(SizeOptions)
def run(options: SizeOptions) -> None:
    """Compute how many hosts of which kind serve a request rate within a p99 objective, and their cost.

    The planner computes how many ranks the memory needs. Capacity is measured: `recinfer bench capacity` raises the
    load on a real server until it misses the objective, and hosts are planned for 70 % of that rate. The latency of a
    request to several shard servers is computed from the measurement. Exit code 1: no kind of host meets the objective.
    """
    from recinfer.archive.reader import open_archive
    from recinfer.sizing.deployment import deployment
    from recinfer.sizing.hosts import EXAMPLE_HOSTS, priced, read_hosts
    from recinfer.sizing.report import as_data as as_row
    from recinfer.sizing.report import draw_curve

    output, given = Output(options.as_json), options.hosts
    if options.plot is not None:
        check_picture(options.plot)
    hosts = priced(read_hosts(given.hosts) if given.hosts is not None else EXAMPLE_HOSTS, given.price or [])
    folder = local_archive(options.archive, output, rows=not options.capacity)
    manifest = open_archive(folder, ranks=()).manifest
    server, sharded = _read(options, manifest)
    goal = _goal(options, server or sharded)
    if not options.capacity:
        server, sharded = _measured_now(options, folder, goal, manifest, hosts, output)
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
    """The measurements of --capacity for a server, and for a ranker with a shard server; None if --capacity lacks
    one."""
    from recinfer.sizing.capacity import Measured

    found: dict[str, Measured] = {}
    for path in options.capacity or []:
        each = Measured.load(path)
        if each.what in found:
            raise ConfigError(
                f"--capacity {path}: two files measure a {each.what}; give one of a server and one of a ranker and "
                f"shard"
            )
        if each.model != manifest.model:
            raise ConfigError(
                f"--capacity {path}: it measures model {each.model}, but the archive holds {manifest.model}"
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
        raise ConfigError("--qps: got none; give the requests per second, or a --trace to take them from")
    p99_s = options.p99_ms / 1e3 if options.p99_ms is not None else None if measured is None else measured.p99_s
    if p99_s is None:
        raise ConfigError("--p99-ms: got none; give the objective in milliseconds, for example 20")
    return Goal(qps, p99_s, options.hosts.min_replicas)


def _measured_now(
    options: SizeOptions, archive: Path, goal: Goal, manifest: Manifest, hosts: Sequence[HostType], output: Output
) -> tuple[Measured | None, Measured | None]:
    """Measures the kinds of servers that the candidate deployments need: one server, then a ranker and shard server."""
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
    subject = MeasuredServer(archive)
    server = measure(subject, load, ClientOptions(), output) if 1 in counts else None
    sharded = measure(replace(subject, sharded=True), load, ClientOptions(), output) if counts - {1} else None
    for each in (server, sharded):
        if each is not None:
            show_measured(output, each)
    return server, sharded


def _show(output: Output, found: Sequence[Deployment], goal: Goal, measured: Sequence[Measured]) -> None:
    from recinfer.sizing.report import COLUMNS, rows

    title = f"{goal.qps:,.0f} requests/s, p99 within {goal.p99_s * 1e3:g} ms"
    table = slim_table(*COLUMNS, numbers=COLUMNS[2:], title=title)
    shown = rows(found)
    for at, row in enumerate(shown):
        style = "bold green" if not at and found[0].meets else "dim" if not found[at].meets else ""
        table.add_row(*row, style=style)
    output.show(table)
    reasons: dict[str, list[str]] = {}
    for each in found[: len(shown)]:
        if each.why_not:
            reasons.setdefault(each.why_not, []).append(each.host.name)
    for reason, names in reasons.items():
        output.show(f"{', '.join(names)}: {reason}")
    best = found[0]
    if not best.meets:
        output.show(styled("bold red", "no kind of host meets the objective"))
        return
    what = f"{best.replicas} {best.host.name} hosts, each with all tables"
    if best.rankers:
        what = f"{best.shards} shards x {best.replicas} replicas and {best.rankers} rankers on {best.host.name} hosts"
    each_at = f": {best.share:.0%} of the knee each, {best.cost:,.2f} per hour"
    output.show(styled("bold green", what, each_at))
    if best.share_one_lost > 1:
        output.show(styled("yellow", "when one host fails, the others are overloaded; raise --min-replicas"))
    for measurement in measured:
        where = measurement.machine
        output.note(
            f"{measurement.what}: knee {measurement.knee_qps:,.0f} requests/s, measured on {where['cores']} cores of "
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

    output.note("assumption: a host's knee grows with its number of cores; where you can, measure on the host itself")
    if any(each.shards == 1 and each.p99_s is not None for each in found):
        output.note("p99 of one shard is that of the measured server at the same share of its knee")
    if sharded is not None and sharded.service_s and any(each.shards > 1 and each.replicas for each in found):
        paper = agreement(sharded)
        figures = (
            f"p99 at {paper.qps:,.0f} requests/s: {paper.carried_s * 1e3:.2f} ms, measured {paper.measured_s * 1e3:.2f}"
        )
        if paper.agrees:
            output.note(
                f"p99 with several shard servers is computed with a queueing model; on the measured server the model "
                f"gives {figures}"
            )
        else:
            output.note(
                f"no p99 with several shard servers: the queueing model disagrees with the measurement ({figures})"
            )
    priced = {text.partition("=")[0] for text in given.price or []}
    made_up = [] if given.hosts is not None else [host.name for host in hosts if host.name not in priced]
    if made_up:
        whose = f" of {', '.join(made_up)}" if priced else ""
        output.note(f"prices{whose} are examples; give yours with --hosts FILE or --price NAME=PRICE")
