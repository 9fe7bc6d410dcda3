"""``recinfer mar``: writes a TorchServe model archive that serves an archive."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption, Output, styled

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "mar"
EXAMPLE = "Example: recinfer mar movielens.rqa --export-path model_store"


class ArchiveFormat(StrEnum):
    """The TorchServe archive formats that suit large tables."""

    no_archive = "no-archive"
    zip_store = "zip-store"


def run(
    archive: Annotated[Path, typer.Argument(help="Archive folder.", show_default=False)],
    export_path: Annotated[Path, typer.Option("--export-path", help="Folder of TorchServe's model store.")],
    archive_format: Annotated[
        ArchiveFormat, typer.Option("--archive-format", help="no-archive writes a folder, zip-store one file.")
    ] = ArchiveFormat.no_archive,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Name of the model in TorchServe.", show_default="the archive's")
    ] = None,
    archive_at: Annotated[
        Path | None,
        typer.Option("--archive-at", help="Path of the archive as TorchServe sees it, for example in a container."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of worker processes; they share the archive's memory.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Most requests that TorchServe merges into one batch.")] = 1,
    max_batch_delay_ms: Annotated[
        int, typer.Option(min=1, help="Longest time to wait for a batch to fill, in milliseconds.")
    ] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing TorchServe archive of that name.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a TorchServe model archive that serves an archive with recinfer's handler.

    The TorchServe archive is small: it refers to the archive's folder, so keep the folder in place.
    docs/how-to/torchserve.md shows how to start TorchServe.
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
    output.show(styled("green", "wrote", f" {written}"))
    output.finish({"archive": str(archive), "mar": str(written), "archive_format": archive_format.value})
