"""``recinfer bench capacity``: measures the knee, the highest rate at which a server meets its p99 objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.archives import local_archive
from recinfer.cli.client import ClientOptions, client_arguments, open_client
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, styled
from recinfer.cli.declared import takes
from recinfer.cli.options import RequestKind, check_picture, check_place
from recinfer.errors import ConfigError
from recinfer.printed import slim_table

if TYPE_CHECKING:
    from recinfer.serving.client.client import ModelDescription
    from recinfer.sizing.arrivals import Trace
    from recinfer.sizing.capacity import Measured

__all__ = ["EXAMPLE", "LoadOptions", "MeasuredServer", "capacity", "measure", "show_measured"]

EXAMPLE = (
    "Example: recinfer bench capacity movielens.rqa --p99-ms 10 --out capacity.json --plot capacity.png\n\n"
    "A server that runs elsewhere: recinfer bench capacity --target host:8500 --p99-ms 10"
)


@dataclass(frozen=True)
class LoadOptions:
    """The latency objective, and the requests of the load."""

    p99_ms: Annotated[
        float,
        typer.Option(
            "--p99-ms", min=0.01, help="Objective: 99 % of requests get a response within this many milliseconds."
        ),
    ]
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace with arrival times and sizes of requests, as JSON lines or CSV; see the page Measure capacity."
        ),
    ] = None
    call: Annotated[
        RequestKind | None, typer.Option(help="Kind of request.", show_default="predict, if the model has a dense part")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples per request, without --trace.")] = 1
    ids: Annotated[float, typer.Option(min=0, help="Ids per sample and feature, without --trace.")] = 1.0
    seconds: Annotated[
        float, typer.Option(min=0.2, help="Seconds of load per rate; a measurement tries 20 to 40 rates.")
    ] = 3.0
    max_qps: Annotated[float, typer.Option("--max-qps", min=1, help="Highest rate to try.")] = 100_000.0
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the arrival times.")] = 0


@dataclass(frozen=True)
class CapacityOptions:
    """All options of ``recinfer bench capacity``."""

    load: LoadOptions
    client: ClientOptions
    archive: Annotated[
        str | None, typer.Argument(help="Archive folder, or its URL, to start a server for.", show_default=False)
    ] = None
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="HOST:PORT", help="Measure this running server instead of starting one."),
    ] = None
    sharded: Annotated[
        bool,
        typer.Option(
            "--sharded", help="Start a ranker and one shard server that holds all ranks, instead of one server."
        ),
    ] = False
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the measurement to this file (JSON), for `recinfer size`.")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Plot p50 and p99 against the request rate to this file."),
    ] = None
    as_json: JsonOption = False


@takes(CapacityOptions)
def capacity(options: CapacityOptions) -> None:
    """Measure the highest request rate at which a server meets a p99 latency objective (the knee).

    Requests arrive at the times of a trace or of a Poisson process, however slow the server is. Latency counts from the
    time at which a request was due. The command starts a server for ARCHIVE, or measures a running one (--target).
    Prefer a server on another machine: on one machine the load takes cores from the server. Takes one to three minutes.
    Exit code 1: no rate meets the objective.
    """
    from recinfer.sizing.report import draw_curve

    output = Output(options.as_json)
    if (options.archive is None) == (options.target is None):
        raise ConfigError("give either ARCHIVE, to start a server for it, or --target HOST:PORT of a running server")
    if options.plot is not None:
        check_picture(options.plot)
    if options.out is not None:
        check_place("--out", options.out)
    archive = None if options.archive is None else local_archive(options.archive, output)
    subject = MeasuredServer(archive, options.target, options.sharded)
    found = measure(subject, options.load, options.client, output)
    show_measured(output, found)
    if options.out is not None:
        found.save(options.out)
        output.note(f"wrote {options.out}")
    if options.plot is not None:
        draw_curve(found, options.plot)
        output.note(f"wrote {options.plot}")
    output.finish(as_data(found))
    if not found.knee_qps:
        raise typer.Exit(EXIT_FAILED_CHECK)


@dataclass(frozen=True)
class MeasuredServer:
    """The server to measure: started for an archive (as a ranker and a shard server with ``sharded``), or running at a
    target."""

    archive: Path | None = None
    target: str | None = None
    sharded: bool = False

    @property
    def what(self) -> str:
        """The value of ``what`` in :class:`recinfer.sizing.capacity.Measured`."""
        return "ranker and shard" if self.sharded else "server"


def measure(subject: MeasuredServer, load: LoadOptions, client: ClientOptions, output: Output) -> Measured:
    """Start the server unless it runs already, measure it, and stop it."""
    from recinfer.sizing.arrivals import read_trace
    from recinfer.sizing.capacity import Measured, find_knee, this_machine
    from recinfer.sizing.load import Driver, encode_requests

    recorded = None if load.trace is None else read_trace(load.trace)
    output.note(
        f"starting a {subject.what} for {subject.archive}" if subject.target is None else f"loading {subject.target}"
    )
    with _server(subject) as (target, cpu_s):
        arguments = client_arguments(client)
        with open_client(target, client) as asker:
            asker.wait_until_ready(max(client.wait, 60.0) if subject.target is None else max(client.wait, 1.0))
            model = asker.get_model()
        call = _call(load, subject, model)
        trace = recorded or _arrivals(load, model)
        name, version = client.model, model.version if client.label else client.version
        requests = encode_requests(model, call, trace, name=name, version=version, seed=load.seed)
        # A request that takes ten times the objective is lost, so a measurement ends soon after its last request.
        timeout = max(1.0, load.p99_ms / 100)
        with (
            Driver(target, call, requests, **{**arguments, "timeout": timeout}) as driver,
            output.bar("", lines=True) as progress,
        ):
            found = find_knee(
                driver,
                trace,
                load.p99_ms / 1e3,
                seconds=load.seconds,
                max_qps=load.max_qps,
                seed=load.seed,
                cpu_s=cpu_s,
                progress=progress,
            )
    return Measured(
        what=subject.what,
        model=model.name,
        version=model.version,
        call=call,
        batch=float(trace.batches.mean()),
        ids=trace.ids_per_sample,
        p99_s=load.p99_ms / 1e3,
        machine=this_machine(),
        **found,
    )


@contextmanager
def _server(subject: MeasuredServer) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Yields its target and a function that gives the CPU seconds of each of its processes so far."""
    from recinfer.serving.server_process import START_S, ServerProcess, ranker_and_shard

    if subject.target is not None:
        yield subject.target, dict
        return
    assert subject.archive is not None
    if not subject.sharded:
        with ServerProcess(subject.archive, "--port", "0", start_s=START_S) as server:
            yield server.target, lambda: {"server": server.cpu_s()}
        return
    from recinfer.archive.reader import open_archive

    world_size = open_archive(subject.archive, ranks=()).manifest.world_size
    with ranker_and_shard(subject.archive, world_size) as (ranker, shard):
        yield ranker.target, lambda: {"ranker": ranker.cpu_s(), "shard": shard.cpu_s()}


def _call(load: LoadOptions, subject: MeasuredServer, model: ModelDescription) -> Any:
    if load.call is not None:
        return load.call.value
    if subject.archive is None:
        return "predict" if model.num_dense else "lookup"
    from recinfer.archive.reader import open_archive

    return "predict" if open_archive(subject.archive, ranks=()).manifest.dense is not None else "lookup"


def _arrivals(load: LoadOptions, model: ModelDescription) -> Trace:
    from recinfer.sizing.arrivals import poisson

    features = len({feature.name.split("@")[0] for feature in model.features})
    mean = load.ids * features
    return poisson(1000.0, 20_000, batch=load.batch, ids_per_sample=mean, seed=load.seed, spread_ids=False)


def show_measured(output: Output, found: Measured) -> None:
    """Show the measured rates and the knee."""
    kind = f"{found.call.capitalize()} of {found.batch:g} samples, {found.ids:g} ids per sample"
    title = f"{found.what} of {found.model} {found.version}: {kind}; objective: p99 within {found.p99_s * 1e3:g} ms"
    numbers = ("requests/s", "p50 ms", "p99 ms", "p99 range", "in time", "sent late\nby, p99", "objective")
    table = slim_table(*numbers, numbers=numbers, title=title)
    for point in found.points:
        table.add_row(
            f"{point.qps:,.0f}",
            _ms(point.p50_s),
            _ms(point.p99_s),
            f"{_ms(point.spread_s[0])} to {_ms(point.spread_s[1])}",
            f"{point.within:.2%}",
            f"{_ms(point.late_s)} ms",
            styled("green", "met") if point.kept else styled("red", "missed"),
        )
    output.show(table)
    if not found.knee_qps:
        alone = f": a request on an idle server takes {_ms(found.alone_s[100])} ms (median)"
        output.show(styled("bold red", "no rate meets the objective", alone))
        return
    least = "at least " if found.at_least else ""
    output.show(styled("bold green", f"knee: {least}{found.knee_qps:,.0f} requests/s", "; plan for 70 % of it"))
    if found.cpu_s:
        used = ", ".join(f"{name} {found.knee_qps * each:.2f}" for name, each in found.cpu_s.items())
        output.note(f"cores in use at the knee: {used} of {found.machine['cores']}")
    if found.driver_late:
        output.note(
            "this machine sent requests late near the knee, so the real knee may be higher; run the load on another "
            "machine with --target"
        )


def as_data(found: Measured) -> dict[str, Any]:
    """The JSON output; times are in milliseconds."""
    return {
        "what": found.what,
        "model": found.model,
        "version": found.version,
        "call": found.call,
        "batch": found.batch,
        "ids_per_sample": found.ids,
        "p99_ms": found.p99_s * 1e3,
        "knee_qps": found.knee_qps,
        "knee_is_at_least": found.at_least,
        "driver_late": found.driver_late,
        "cpu_s_per_request": found.cpu_s,
        "machine": found.machine,
        "rates": [
            {
                "qps": point.qps,
                "p50_ms": point.p50_s * 1e3,
                "p99_ms": point.p99_s * 1e3,
                "within": point.within,
                "kept": point.kept,
                "late_ms": point.late_s * 1e3,
            }
            for point in found.points
        ],
    }


def _ms(seconds: float) -> str:
    return "never" if seconds == float("inf") else f"{seconds * 1e3:.2f}"
