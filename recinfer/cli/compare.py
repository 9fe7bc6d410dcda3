"""``recinfer compare``: compares an archive's outputs with outputs recorded in training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from recinfer.cli.archives import ArchiveArgument, local_archive
from recinfer.cli.console import EXIT_FAILED_CHECK, EXIT_PROVES_LITTLE, JsonOption, Output

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "compare"
EXAMPLE = "Example: recinfer compare movielens.rqa --reference recorded.npz"


def run(
    archive: ArchiveArgument,
    reference: Annotated[
        Path,
        typer.Option(
            "--reference", help="Inputs and float outputs recorded in training (.npz or .pt).", show_default=False
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Run recorded inputs through an archive and compare its outputs with the recorded ones.

    The tolerance follows from the archive's precision. Exit code 0: all rows agree. 1: some rows differ. 2: the archive
    or the reference file cannot be read. 3: all rows agree, but the tolerance is wider than the recorded outputs are apart, so
    that an archive of other weights would agree too.
    """
    from recinfer.inference.comparison import compare_archive
    from recinfer.inference.recorded import RecordedReference

    output = Output(as_json)
    recorded = RecordedReference.read(reference)
    found = compare_archive(local_archive(archive, output), recorded)
    output.show(found)
    if not found.ok:
        output.show(Text(found.message(), style="red"))
    output.finish({"archive": archive, **found.to_dict()})
    if not found.ok:
        raise typer.Exit(EXIT_FAILED_CHECK if found.num_wrong else EXIT_PROVES_LITTLE)
