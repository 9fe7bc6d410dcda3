"""``recinfer mar``: an archive to what TorchServe loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption, Output

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "mar"
EXAMPLE = "Example: recinfer mar movielens.rqa --export-path model_store"


class ArchiveFormat(StrEnum):
    """TorchServe's forms of a model archive that make sense for large tables."""

    no_archive = "no-archive"
    zip_store = "zip-store"


def run(
    archive: Annotated[Path, typer.Argument(help="Archive folder.", show_default=False)],
    export_path: Annotated[Path, typer.Option("--export-path", help="TorchServe's model store.")],
    archive_format: Annotated[
        ArchiveFormat, typer.Option("--archive-format", help="no-archive is a folder, zip-store one file.")
    ] = ArchiveFormat.no_archive,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="TorchServe's name for it.", show_default="the archive's")
    ] = None,
    archive_at: Annotated[
        Path | None,
        typer.Option("--archive-at", help="Where TorchServe finds the archive, if not where it is now (a container)."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; they share the archive's memory.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that a worker gets at once.")] = 1,
    max_batch_delay_ms: Annotated[int, typer.Option(min=1, help="How long a batch may wait to fill.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an entry of that name.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack an archive for TorchServe, with recinfer's handler.

    The entry is small and names the archive's folder, which has to stay. docs/how-to/torchserve.md starts TorchServe on it.
    """
    from recinfer.serving.mar import pack

    output = Output(as_json)
    written = pack(
        archive,
        export_path,
        archive_format=archive_format.value,
        model_name=model_name,
        archive_at=archive_at,
        workers=workers,
        batch_size=batch_size,
        max_batch_delay_ms=max_batch_delay_ms,
        force=force,
    )
    output.show(f"[green]wrote[/green] {written}")
    output.finish({"archive": str(archive), "mar": str(written), "archive_format": archive_format.value})
