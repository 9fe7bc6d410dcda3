"""``recinfer train``: raw rows to a trained DLRM and its checkpoint, on one process or many."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer import env
from recinfer.cli.console import JsonOption, Output
from recinfer.cli.interrupts import cleaning_up_on_sigterm
from recinfer.cli.options import DataFormat, Device, parse_pair
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.training.job import TrainJob

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "train"
EXAMPLE = (
    "Example: recinfer train --data ratings.inter --format movielens --out movielens.ckpt --epochs 3\n\n"
    "On 4 ranks: recinfer train --data day_0.gz --format criteo --stream --world-size 4 --sharding '*=row_wise' "
    "--out ctr.ckpt --metrics curve.csv --plot curve.png --save-every 1000"
)


def run(
    out: Annotated[Path, typer.Option("--out", help="Checkpoint folder to write.", show_default=False)],
    data: Annotated[
        Path | None, typer.Option("--data", help="Rows to train on, a file or a folder; not needed for synthetic.")
    ] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="What the rows are.")] = DataFormat.synthetic,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training split.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a rank in one step.")] = 512,
    embedding_dim: Annotated[int, typer.Option(min=1, help="Columns of every table.")] = 16,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only this many rows.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="Of the split, the initial weights and synthetic rows.")] = 0,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to start on this host; under torchrun its own are used.", show_default="1"),
    ] = None,
    sharding: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=TYPE", help="Shard a table so (table_wise, row_wise ...); '*' is all others."),
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan of `recinfer plan` to shard by.")] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Read the rows anew in every pass instead of keeping them in memory.",
            show_default="for gzip, parquet, folders and files over 256 MiB",
        ),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", help="Write losses and metrics to this CSV file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the learning curve, for example curve.png.")] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints, for --resume; kept next to --out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of --save-every.")] = False,
    device: Annotated[
        Device, typer.Option(help="Where ranks compute; cuda gives each rank a GPU of its own (NCCL).")
    ] = Device.cpu,
    as_json: JsonOption = False,
) -> None:
    """Train the reference DLRM on click or rating rows and write a checkpoint.

    The checkpoint is a torch.distributed.checkpoint folder with a model.json, which holds the model's shape and how raw
    values become ids. A tenth of the rows, chosen at random, is held out; AUC, log-loss and normalized entropy on them
    are what is printed. With --world-size the tables are sharded over that many processes of this host; started by
    torchrun, over its ranks on any number of hosts.
    """
    from recinfer.training.job import TrainJob, run_job

    given = env.torchrun_rank()
    if given is not None and world_size not in (None, given[1]):
        raise ConfigError(f"--world-size {world_size}: torchrun started {given[1]} ranks; leave the option out")
    job = TrainJob(
        out=out,
        data=data,
        format=format.value,
        epochs=epochs,
        batch_size=batch_size,
        embedding_dim=embedding_dim,
        limit=limit,
        seed=seed,
        sharding=dict(parse_pair(s, "--sharding", "TABLE=TYPE, for example '*=row_wise'") for s in sharding or ()),
        plan=plan,
        stream=stream,
        metrics=metrics,
        plot=plot,
        save_every=save_every,
        resume=resume,
        device=device.value,
    )
    first = given is None or given[0] == 0
    output = Output(as_json)
    started = time.perf_counter()
    if first:
        output.note(f"rows: {data or 'made up, in the Criteo format'}")
    with cleaning_up_on_sigterm():
        report = run_job(job, world_size or 1)
    if report is None:  # not the first of torchrun's ranks
        return
    _show(output, job, report, time.perf_counter() - started)


def _show(output: Output, job: TrainJob, report: Any, seconds: float) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "held-out AUC": f"{report.auc:.5f}",
        "held-out log-loss": f"{report.log_loss:.5f}",
        "normalized entropy": f"{report.normalized_entropy:.5f}",
        "rows": f"{report.num_train_rows:,} trained on, {report.num_test_rows:,} held out",
        "steps": f"{report.num_steps:,} at {report.samples_per_second:,.0f} samples/s on {report.world_size} rank{'s' * (report.world_size > 1)}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    output.show(table)
    for what, path in (("curve", job.metrics), ("plot", job.plot)):
        if path is not None:
            output.show(f"[green]wrote[/green] {path} ({what})")
    output.show(
        f"[green]wrote[/green] {job.out}  AUC {report.auc:.4f}  log-loss {report.log_loss:.4f}  {seconds:.1f} s"
    )
    output.finish({"checkpoint": str(job.out), **dataclasses.asdict(report), "seconds": seconds})
