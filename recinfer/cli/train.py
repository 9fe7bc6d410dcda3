"""``recinfer train``: raw rows to a trained DLRM and its checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption, Output
from recinfer.cli.options import DataFormat

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "train"
EXAMPLE = "Example: recinfer train --data ratings.inter --format movielens --out movielens.ckpt --epochs 3"


def run(
    out: Annotated[Path, typer.Option("--out", help="Checkpoint folder to write.", show_default=False)],
    data: Annotated[Path | None, typer.Option("--data", help="Rows to train on; not needed for synthetic.")] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="What the rows are.")] = DataFormat.synthetic,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training split.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a step.")] = 512,
    embedding_dim: Annotated[int, typer.Option(min=1, help="Columns of every table.")] = 16,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only this many rows.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="Of the split, the initial weights and synthetic rows.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train the reference DLRM on click or rating rows and write a checkpoint.

    The checkpoint is a torch.distributed.checkpoint folder with a model.json, which holds the model's shape and how raw
    values become ids. A tenth of the rows, chosen at random, is held out; its AUC and log-loss are what is printed.
    """
    from recinfer.data.dataset import load_dataset
    from recinfer.training import train

    output = Output(as_json)
    started = time.perf_counter()
    output.note(f"rows: {data or 'made up, in the Criteo format'}")
    dataset = load_dataset(data, format.value, limit=limit, seed=seed)
    result = train(
        dataset,
        embedding_dim=embedding_dim,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        out=out,
        progress=True,
    )
    seconds = time.perf_counter() - started
    output.show(f"[green]wrote[/green] {out}  AUC {result.auc:.4f}  log-loss {result.log_loss:.4f}  {seconds:.1f} s")
    output.finish({"checkpoint": str(out), "auc": result.auc, "log_loss": result.log_loss, "seconds": seconds})
