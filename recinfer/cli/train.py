"""``recinfer train``: trains a DLRM on raw rows and writes its checkpoint, with one process or several."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer import env
from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.options import DataFormat, Device, check_other_file, check_picture, parse_pair
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.training.job import TrainJob

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "train"
EXAMPLE = (
    "Example: recinfer train --data ratings.inter --format movielens --out movielens.ckpt --epochs 3\n\n"
    "On 4 ranks: recinfer train --data day_0.gz --format criteo --stream --world-size 4 --sharding '*=row_wise' "
    "--out ctr.ckpt --metrics curve.csv --plot curve.png --save-every 1000\n\n"
    "Go on with new rows: recinfer train --start-from movielens.ckpt --data monday.inter --format movielens --out monday.ckpt"
)


def run(
    out: Annotated[
        Path,
        typer.Option("--out", help="Checkpoint folder to write; a checkpoint there is replaced.", show_default=False),
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="File or folder with the rows to train on; not needed for --format synthetic."),
    ] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="Format of the rows.")] = DataFormat.synthetic,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training split.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per rank and training step.")] = 512,
    embedding_dim: Annotated[
        int | None,
        typer.Option(min=1, help="Embedding dimension of every table.", show_default="16, or that of --start-from"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only the first N rows.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the split, the initial weights and synthetic rows.")] = 0,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of ranks to start on this host. Leave it out under torchrun.", show_default="1"
        ),
    ] = None,
    sharding: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=TYPE",
            help="Sharding type of a table, such as table_wise or row_wise; repeatable. '*' means all other tables.",
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Shard by this plan, written by `recinfer plan`.")] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Read the rows from disk in every epoch instead of keeping them in memory.",
            show_default="for gzip, parquet, folders and files over 256 MiB",
        ),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", help="Write losses and metrics to this CSV file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the learning curve, for example curve.png.")] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Write a checkpoint for --resume every N steps, next to --out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint of --save-every.")
    ] = False,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            help="Start with the weights, optimizer states and feature contract of this checkpoint, to go on with new rows.",
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Device of the ranks; cuda gives each rank its own GPU (NCCL).")
    ] = Device.cpu,
    as_json: JsonOption = False,
) -> None:
    """Train the reference DLRM on click or rating rows and write a checkpoint.

    The checkpoint is a torch.distributed.checkpoint folder with a model.json, which holds the model's shape and its
    feature contract (how raw values become ids). A random tenth of the rows is held out; the command prints AUC,
    log-loss and normalized entropy on it. --world-size shards the tables over that many processes of this host. Under
    torchrun they are sharded over its ranks, on any number of hosts.
    """
    from recinfer.training.job import TrainJob, run_job

    check_other_file("--metrics", metrics, data)
    if plot is not None:
        check_other_file("--plot", plot, data)
        check_picture(plot)
    if start_from is not None and embedding_dim is not None:
        raise ConfigError(
            "got --embedding-dim and --start-from, whose checkpoint sets the dimension; leave one of them out"
        )
    given = env.torchrun_rank()
    if given is not None and world_size not in (None, given[1]):
        raise ConfigError(f"--world-size {world_size}, but torchrun started {given[1]} ranks; leave --world-size out")
    job = TrainJob(
        out=out,
        data=data,
        format=format.value,
        epochs=epochs,
        batch_size=batch_size,
        embedding_dim=embedding_dim or 16,
        limit=limit,
        seed=seed,
        sharding=dict(parse_pair(s, "--sharding", "TABLE=TYPE, for example '*=row_wise'") for s in sharding or ()),
        plan=plan,
        stream=stream,
        metrics=metrics,
        plot=plot,
        save_every=save_every,
        resume=resume,
        start_from=start_from,
        device=device.value,
    )
    first = given is None or given[0] == 0
    output = Output(as_json)
    started = time.perf_counter()
    if first:
        output.note(f"rows: {data or 'synthetic, in the Criteo format'}")
    report = run_job(job, world_size or 1)
    if report is None:  # torchrun's other ranks have no report
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
    if report.ids_admitted:
        rows["raw ids"] = f"{report.ids_admitted:,} admitted, {report.ids_evicted:,} evicted"
    for name, value in rows.items():
        table.add_row(name, value)
    output.show(table)
    for what, path in (("curve", job.metrics), ("plot", job.plot)):
        if path is not None:
            output.show(styled("green", "wrote", f" {path} ({what})"))
    quality = f"AUC {report.auc:.4f}  log-loss {report.log_loss:.4f}"
    output.show(styled("green", "wrote", f" {job.out}  {quality}  {seconds:.1f} s"))
    output.finish({"checkpoint": str(job.out), **dataclasses.asdict(report), "seconds": seconds})
