"""``recinfer plan``: plans which rank holds which shard of a checkpoint's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.declared import takes_groups
from recinfer.cli.id_options import PlanIds
from recinfer.cli.models import (
    CheckpointOption,
    ModelOption,
    TablePrecisionOption,
    open_checkpoint,
    parse_precisions,
)
from recinfer.cli.options import Device, check_picture, check_place
from recinfer.quant.formats.names import Precision

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "plan"
EXAMPLE = "Example: recinfer plan --checkpoint movielens.ckpt --world-size 2 --precision int8 --out plan.json"


@takes_groups
def run(
    checkpoint: CheckpointOption,
    world_size: Annotated[int, typer.Option(min=1, max=65536, help="Number of ranks to place the tables on.")],
    out: Annotated[Path, typer.Option("--out", help="Plan file to write (JSON).")],
    model: ModelOption = None,
    device: Annotated[Device, typer.Option(help="Device that the ranks compute on.")] = Device.cpu,
    hbm_gb: Annotated[float | None, typer.Option(min=0, help="Device memory per rank, in GiB.")] = None,
    ddr_gb: Annotated[float | None, typer.Option(min=0, help="Host memory per rank, in GiB.")] = None,
    precision: Annotated[Precision, typer.Option(help="Element type of the stored rows.")] = "int8",
    table_precision: TablePrecisionOption = None,
    *,
    ids: PlanIds,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per request, for the time estimates.")] = 512,
    hardware: Annotated[
        Path | None,
        typer.Option("--hardware", help="Hardware figures, written by `recinfer calibrate`.", show_default="typical"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Also plot load and memory of each rank to this file."),
    ] = None,
    timeout_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Stop the search after this time and keep the best plan found.",
            show_default="search to the end",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan which rank holds which shard of which table.

    The planner reads shapes only: it needs no GPU and no weights. Show the written plan with `recinfer inspect`.
    """
    from recinfer.distributed.planner import plan_inference
    from recinfer.distributed.planner.model.hardware import HardwareProfile
    from recinfer.distributed.planner.stats import format_plan
    from recinfer.modules.embedding_configs import DataType

    output = Output(as_json)
    check_place("--out", out)
    if plot:
        check_picture(plot)
    reader, module = open_checkpoint(checkpoint, model)
    plan = plan_inference(
        module,
        world_size=world_size,
        compute_device=device.value,
        precision=DataType.parse(precision),
        per_table_precision=parse_precisions(table_precision),
        hbm_gb=hbm_gb,
        ddr_gb=ddr_gb,
        batch_size=batch_size,
        indexed=ids.indexed(reader.contract),
        hardware=HardwareProfile.load(hardware) if hardware else None,
        timeout_seconds=timeout_seconds,
    )
    plan.save(out)
    if plot:
        from recinfer.distributed.planner.plot import plot_plan

        plot_plan(plan, plot)
    output.show(*format_plan(plan), styled("green", "wrote", f" {out}  {plan.hash[:12]}"))
    output.finish(
        {
            "plan": str(out),
            "plan_hash": plan.hash,
            "world_size": plan.world_size,
            "tables": len(plan.tables),
            "estimates": plan.estimates,
        }
    )
