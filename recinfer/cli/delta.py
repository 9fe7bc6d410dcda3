"""``recinfer delta``: an archive and a new checkpoint to the rows that changed."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption, Output
from recinfer.cli.format import mebibytes
from recinfer.cli.models import ModelOption, open_checkpoint

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "delta"
EXAMPLE = "Example: recinfer delta movielens.rqa newer.ckpt --out monday.rqd"


def run(
    archive: Annotated[Path, typer.Argument(help="Archive folder that is served.", show_default=False)],
    checkpoint: Annotated[Path, typer.Argument(help="The new checkpoint, as for export.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Delta to write, by custom *.rqd.")],
    after: Annotated[
        list[Path] | None,
        typer.Option("--after", help="Delta that is applied before this one; repeatable, in order."),
    ] = None,
    model: ModelOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what changed since an archive was exported: packed rows that differ, and the dense part.

    A process that serves the archive applies it with Predictor.apply_delta, between two requests, and can undo it; a
    server that starts takes it with `recinfer serve --delta`.
    """
    from recinfer.archive.reader import open_archive
    from recinfer.inference.delta import make_delta

    output = Output(as_json)
    started = time.perf_counter()
    reader, module = open_checkpoint(checkpoint, model)
    report = make_delta(archive, module, reader, out, after=after or [], overwrite=overwrite)
    seconds = time.perf_counter() - started
    output.show(
        f"[green]wrote[/green] {out}  sequence {report.sequence}, {report.rows:,} rows of {len(report.changed)} tables, "
        f"{mebibytes(report.num_bytes)}  {seconds:.1f} s"
    )
    whole = open_archive(archive, ranks=()).manifest.bytes_total
    if report.num_bytes >= whole:
        output.show(
            f"[yellow]the delta is larger than the archive ({mebibytes(report.num_bytes)}, {mebibytes(whole)}): "
            "export the checkpoint as a new version instead[/yellow]"
        )
    sizes = {"archive_bytes": whole, "larger_than_archive": report.num_bytes >= whole}
    output.finish({"delta": str(out), **asdict(report), **sizes, "seconds": seconds})
