"""``recinfer mar``: an archive to what TorchServe loads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption, Output

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "mar"
EXAMPLE = "Example: recinfer mar movielens.rqa --export-path model_store"


class ArchiveFormat(str, Enum):
    """TorchServe's forms of a model archive that make sense for large tables."""

    no_archive = "no-archive"
    zip_store = "zip-store"


def run(
    archive: Annotated[Path, typer.Argument(help="Archive folder.", show_default=False)],
    export_path: Annotated[Path, typer.Option("--export-path", help="TorchServe's model store.")],
    archive_format: Annotated[
        ArchiveFormat, typer.Option("--archive-format", help="no-archive links or copies; zip-store is one file.")
    ] = ArchiveFormat.no_archive,
    as_json: JsonOption = False,
) -> None:
    """Pack an archive for TorchServe, with recinfer's handler.

    See docs/torchserve.md for starting TorchServe on it.
    """
    from recinfer.serving.mar import pack

    output = Output(as_json)
    written = pack(archive, export_path, archive_format=archive_format.value)
    output.show(f"[green]wrote[/green] {written}")
    output.finish({"archive": str(archive), "mar": str(written), "archive_format": archive_format.value})
