"""``recinfer delta``: writes the rows and weights that a newer checkpoint changes in an archive."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.archives import ArchiveArgument, local_archive
from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.declared import takes_groups
from recinfer.cli.id_options import DeltaIds
from recinfer.cli.models import InputsOption, ModelOption, open_checkpoint
from recinfer.sizes import size_text

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "delta"
EXAMPLE = "Example: recinfer delta movielens.rqa newer.ckpt --out monday.rqd"


@takes_groups
def run(
    archive: ArchiveArgument,
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Newer checkpoint of the same model, in a format that export reads.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", help="Delta file to write, usually named *.rqd.")],
    after: Annotated[
        list[Path] | None,
        typer.Option("--after", help="Earlier delta that this one is applied after; repeatable, in order."),
    ] = None,
    model: ModelOption = None,
    inputs: InputsOption = None,
    *,
    ids: DeltaIds,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a delta: the table rows and dense weights that a newer checkpoint changes in an archive.

    Apply a delta to a served version with `recinfer admin delta`, at server start with `recinfer serve --delta`, or in
    your own process with Predictor.apply_delta. A delta can be undone.
    """
    from recinfer.archive.reader import open_archive
    from recinfer.checkpoint import resolve_inputs
    from recinfer.inference.delta import make_delta

    output = Output(as_json)
    started = time.perf_counter()
    folder = local_archive(archive, output)
    reader, module = open_checkpoint(checkpoint, model)
    batches = resolve_inputs(inputs) if inputs else ()
    report = make_delta(
        folder,
        module,
        reader,
        out,
        after=after or [],
        inputs=batches,
        overwrite=overwrite,
        **ids.arguments,
    )
    seconds = time.perf_counter() - started
    changed = f"sequence {report.sequence}, {report.rows:,} rows of {len(report.changed)} tables"
    output.show(styled("green", "wrote", f" {out}  {changed}, {size_text(report.num_bytes)}  {seconds:.1f} s"))
    whole = open_archive(folder, ranks=()).manifest.bytes_total
    if report.num_bytes >= whole:
        both = f"{size_text(report.num_bytes)}, {size_text(whole)}"
        advice = "export the checkpoint as a new version instead"
        output.show(styled("yellow", f"the delta is larger than the archive ({both}): {advice}"))
    sizes = {"archive_bytes": whole, "larger_than_archive": report.num_bytes >= whole}
    output.finish({"delta": str(out), **asdict(report), **sizes, "seconds": seconds})
