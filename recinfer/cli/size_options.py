"""The options of ``recinfer size``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption
from recinfer.cli.options import Precision

__all__ = ["AskedCall", "CandidateOptions", "LoadOptions", "ServerOptions", "SizeOptions"]


class AskedCall(StrEnum):
    """What requests ask for."""

    lookup = "lookup"
    predict = "predict"


@dataclass(frozen=True)
class LoadOptions:
    """The model, the promise and the requests that come."""

    archive: Annotated[Path, typer.Option("--archive", help="Archive folder: the model to serve.")]
    p99_ms: Annotated[float, typer.Option("--p99-ms", min=0.01, help="99 % of requests are answered within this.")]
    qps: Annotated[float | None, typer.Option(min=0.1, help="Requests a second.", show_default="the trace's")] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="When requests come and how large they are: JSON lines or CSV; see docs/sizing.md."),
    ] = None
    call: Annotated[
        AskedCall | None, typer.Option(help="What requests ask for.", show_default="predict, if the model can")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Samples a request, without a trace.")] = 1
    ids: Annotated[float, typer.Option(min=0, help="Ids a sample and feature, without a trace.")] = 1.0


@dataclass(frozen=True)
class CandidateOptions:
    """What may be chosen from, and what it costs."""

    hosts: Annotated[
        Path | None, typer.Option(help="Kinds of hosts with their prices (JSON).", show_default="made-up ones")
    ] = None
    price: Annotated[list[str] | None, typer.Option(metavar="NAME=PRICE", help="Price of a kind; repeatable.")] = None
    precision: Annotated[
        list[Precision] | None,
        typer.Option(help="Element types that may be chosen; repeatable.", show_default="the archive's, int8, int4"),
    ] = None
    shards: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of shards to try; repeatable.")] = None
    min_replicas: Annotated[int, typer.Option(min=1, help="Hosts of every kind, so that some may be lost.")] = 2
    max_hosts: Annotated[int, typer.Option(min=1, help="Of a deployment.")] = 1000
    serving: Annotated[
        Path | None, typer.Option(help="Costs of calls: `recinfer calibrate --serving`.", show_default="typical")
    ] = None
    hardware: Annotated[
        Path | None, typer.Option(help="Costs of lookups: `recinfer calibrate --out`.", show_default="typical")
    ] = None


@dataclass(frozen=True)
class ServerOptions:
    """How servers merge, ask each other and fall behind."""

    max_batch: Annotated[int, typer.Option(min=1, help="As of `recinfer serve`.")] = 1024
    max_delay_us: Annotated[int, typer.Option(min=0, help="As of `recinfer serve`.")] = 4000
    max_queue: Annotated[int, typer.Option(min=1, help="As of `recinfer serve`.")] = 512
    network_us: Annotated[float, typer.Option(min=0, help="Microseconds one way between hosts.")] = 100.0
    network_gbps: Annotated[float, typer.Option(min=0.001, help="Gigabits a second of a host.")] = 10.0
    straggler_share: Annotated[float, typer.Option(min=0, max=1, help="Share of shards' answers that are late.")] = 0.0
    straggler_ms: Annotated[float, typer.Option(min=0, help="By how much, on average.")] = 20.0
    hedge_budget: Annotated[float, typer.Option(min=0, max=1, help="Share of calls that are sent twice; 0: none.")] = (
        0.1
    )


@dataclass(frozen=True)
class SizeOptions:
    """All of them."""

    load: LoadOptions
    candidates: CandidateOptions
    servers: ServerOptions
    requests: Annotated[int, typer.Option(min=500, help="Simulated for each answer.")] = 20_000
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random.")] = 0
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw p99 against the rate here.")
    ] = None
    write_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the requests that were simulated, as a trace.")
    ] = None
    as_json: JsonOption = False
