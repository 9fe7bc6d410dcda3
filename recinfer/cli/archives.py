"""The archive that a command reads: a folder, or the URL of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recinfer.cli.console import Output
from recinfer.remote.location import Location, is_url

if TYPE_CHECKING:
    from recinfer.remote.cache import CachedArchive

__all__ = ["ArchiveArgument", "local_archive"]

ArchiveArgument = Annotated[str, typer.Argument(help="Archive folder, or its URL.", show_default=False)]

_in_use: list[CachedArchive] = []  # until the process ends


def local_archive(archive: str, output: Output, *, rows: bool = True) -> Path:
    """The folder of an archive; one behind a URL is in the cache folder, which keeps it until the process ends.

    Args:
        output: shows the progress of a download.
        rows: whether the command reads the tables' rows; without them a download leaves out the shard files.

    Raises:
        NotFoundError, ArchiveError, ConfigError, UnavailableError: see ArchiveCache.archive.
    """
    if not is_url(archive):
        return Path(archive)
    from recinfer.inference.progress import byte_bar
    from recinfer.remote.cache import ArchiveCache

    cache = ArchiveCache(progress=lambda what, total: byte_bar(what, total, True), report=output.note)
    _in_use.append(cache.archive(Location(archive), wanted=lambda path: rows or not path.startswith("shards/")))
    return _in_use[-1].path
