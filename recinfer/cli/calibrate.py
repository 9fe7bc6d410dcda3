"""``recinfer calibrate``: this machine, measured, for the planner's estimates."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from recinfer.cli.console import JsonOption, Output
from recinfer.cli.options import Device
from recinfer.errors import ConfigError

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "calibrate"
EXAMPLE = "Example: recinfer calibrate --out hardware.json"
_STEADY = 1.25  # of a machine's pace in one round and in another


def run(
    out: Annotated[
        Path | None, typer.Option("--out", help="Figures to write (JSON), for `recinfer plan --hardware`.")
    ] = None,
    serving: Annotated[
        Path | None, typer.Option("--serving", help="Also, or only, measure calls; for `recinfer size --serving`.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What to measure.")] = Device.cpu,
    seconds_per_point: Annotated[float, typer.Option(min=0.0005, help="Time for each of some 2,000 figures.")] = 0.005,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: lookups by precision, row size and level of the memory, bandwidths, copies to devices.

    With --serving also what calls cost: real servers on loopback, one caller and many, two to three minutes.

    Run it where the model will be served, with nothing else running.
    """
    output = Output(as_json)
    if out is None and serving is None:
        raise ConfigError("--out, --serving: give the file of one of them, or of both")
    payload: dict[str, Any] = {}
    if out is not None:
        payload |= _lookups(output, out, device, seconds_per_point)
    if serving is not None:
        payload |= _calls(output, serving)
    output.finish(payload)


def _calls(output: Output, path: Path) -> dict[str, Any]:
    import torch

    from recinfer.sizing.clock import at_sleep
    from recinfer.sizing.measure import measure_serving

    torch.set_num_threads(1)
    with output.bar("calls", lines=True) as progress:
        costs = measure_serving(progress=progress)
    costs.save(path)
    columns = ("event loop", "takes gRPC's events", "gRPC's own")
    table = Table("microseconds a call", *columns, title="CPU of calls, by thread", title_justify="left")

    def row(name: str, loop_s: float, grpc_s: float, io_s: float) -> None:
        table.add_row(name, *(f"{seconds * 1e6:.0f}" if seconds else "" for seconds in (loop_s, grpc_s, io_s)))

    ends = {"server": costs.server, "caller": costs.client}
    if costs.direct is not None:
        ends = {"server, past its queue": costs.direct.server, **ends}
    for name, end in ends.items():
        row(f"{name}, one behind another", end.loop_s, end.grpc_s, end.io_s)
        row(f"{name}, when it was asleep, more", end.loop_cold_s, end.grpc_cold_s, end.io_cold_s)
        most = (at_sleep(end.cooled(thread), math.inf) for thread in ("loop", "grpc", "io"))
        row(f"{name}, when it had slept for milliseconds, at most more", *most)
    row("a run", costs.run.base_s, 0.0, 0.0)
    row("a run, each request more", costs.run.request_s, 0.0, 0.0)
    row("a shard's run", 0.0, costs.shard.base_s, 0.0)
    row("a ranker's run, more", costs.fan.run_s, 0.0, 0.0)
    row("asking a shard", costs.fan.call_s, 0.0, 0.0)
    output.show(table, f"[green]wrote[/green] {path}")
    pace = costs.notes.get("pace_us")
    if pace is not None and pace["most"] > _STEADY * pace["least"]:
        change = f"{pace['most'] / pace['least'] - 1:.0%}"
        output.note(
            f"this machine was up to {change} slower in some rounds than in others; the costs are of its usual pace"
        )
    return {"serving": str(path), "serving_costs": asdict(costs)}


def _lookups(output: Output, out: Path, device: Device, seconds_per_point: float) -> dict[str, Any]:
    from recinfer.distributed.calibrate import calibrate

    profile = calibrate(device.value, seconds_per_point=seconds_per_point, progress=output.note)
    profile.save(out)
    smallest = min(profile.grids.values(), key=lambda grid: grid.set_bytes[0])
    title = "ns of one more row of middle width in a long bag, by the memory that rows come from"
    table = Table("bits", "row", *(_size(s) for s in smallest.set_bytes), title=title, title_justify="left")
    for bits, grid in sorted(profile.grids.items()):
        few, many = (grid.ids_per_bag[i] for i in (-2, -1))
        middle = len(grid.row_bytes) // 2
        table.add_row(
            str(bits),
            f"{grid.row_bytes[middle]:.0f} B",
            *(f"{(of_set[-1] - of_set[-2]) / (many - few):.1f}" for of_set in grid.bag_ns[middle]),
        )
    overheads = f"a call {profile.call_ms * 1e3:.1f} us, a feature {profile.feature_ms * 1e3:.2f} us"
    output.show(table, overheads, f"[green]wrote[/green] {out}  {profile.name}, {profile.threads} threads")
    return {"hardware": str(out), **asdict(profile)}


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:g} MiB"
