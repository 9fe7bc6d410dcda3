"""``recinfer calibrate``: measures this machine for the planner's estimates."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.options import Device, check_place
from recinfer.sizes import size_text

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "calibrate"
EXAMPLE = "Example: recinfer calibrate --out hardware.json"


def run(
    out: Annotated[
        Path, typer.Option("--out", help="File to write the figures to (JSON), for `recinfer plan --hardware`.")
    ],
    device: Annotated[Device, typer.Option(help="Device to measure.")] = Device.cpu,
    seconds_per_point: Annotated[
        float, typer.Option(min=0.0005, help="Seconds per figure; there are about 2,000 figures.")
    ] = 0.005,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads per lookup; one thread gives the steadiest figures.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure lookup times, memory bandwidths and device copies of this machine for the planner.

    Run it on the machine that will serve the model, with nothing else running.
    """
    from recinfer.distributed.quant.measure import calibrate

    output = Output(as_json)
    check_place("--out", out)
    profile = calibrate(device.value, seconds_per_point=seconds_per_point, threads=threads, progress=output.note)
    profile.save(out)
    smallest = min(profile.grids.values(), key=lambda grid: grid.set_bytes[0])
    title = "ns per additional row in a long bag (row of median width), by working-set size"
    table = Table("bits", "row", *(size_text(s) for s in smallest.set_bytes), title=title, title_justify="left")
    for bits, grid in sorted(profile.grids.items()):
        few, many = (grid.ids_per_bag[i] for i in (-2, -1))
        middle = len(grid.row_bytes) // 2
        table.add_row(
            str(bits),
            f"{grid.row_bytes[middle]:.0f} B",
            *(f"{(of_set[-1] - of_set[-2]) / (many - few):.1f}" for of_set in grid.bag_ns[middle]),
        )
    overheads = f"{profile.call_ms * 1e3:.1f} us per call, {profile.feature_ms * 1e3:.2f} us per feature"
    output.show(table, overheads, styled("green", "wrote", f" {out}  {profile.name}, {profile.threads} threads"))
    output.finish({"hardware": str(out), **asdict(profile)})
