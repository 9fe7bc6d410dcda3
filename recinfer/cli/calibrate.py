"""``recinfer calibrate``: this machine, measured, for the planner's estimates."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from recinfer.cli.console import JsonOption, Output
from recinfer.cli.options import Device

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "calibrate"
EXAMPLE = "Example: recinfer calibrate --out hardware.json"


def run(
    out: Annotated[Path, typer.Option("--out", help="Figures to write (JSON), for `recinfer plan --hardware`.")],
    device: Annotated[Device, typer.Option(help="What to measure.")] = Device.cpu,
    seconds_per_point: Annotated[float, typer.Option(min=0.001, help="Time for each of some 200 figures.")] = 0.03,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: lookups by precision, row and table size, memory, copies to devices.

    Run it where the model will be served, with nothing else running.
    """
    from recinfer.distributed.calibrate import calibrate

    output = Output(as_json)
    profile = calibrate(device.value, seconds_per_point=seconds_per_point, progress=output.note)
    profile.save(out)
    table = Table("bits of an element", "smallest and largest ns a row", "smallest and largest ns a bag")
    for bits, grid in sorted(profile.grids.items()):
        spans = [[value for row in values for value in row] for values in (grid.row_ns, grid.bag_ns)]
        table.add_row(str(bits), *(f"{min(span):.1f} - {max(span):.1f}" for span in spans))
    output.show(table, f"[green]wrote[/green] {out}  {profile.name}, {profile.threads} threads")
    output.finish({"hardware": str(out), **asdict(profile)})
