"""Names of an archive's files, and safe opening: no path leaves the archive's folder, and no pipe blocks the reader."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from recinfer.errors import ArchiveError
from recinfer.strict_json import MAX_JSON_BYTES

__all__ = [
    "FORMAT",
    "MAX_PATH",
    "FileInfo",
    "check_path",
    "file_sha256",
    "open_inside",
    "read_inside",
    "read_manifest_text",
    "shard_path",
]

FORMAT = "recinfer.archive"
"""The format that a manifest names."""
MAX_PATH = 1024
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileInfo:
    """One file of the archive; ``path`` is relative, with ``/``."""

    path: str
    bytes: int
    sha256: str


def shard_path(rank: int) -> str:
    """The archive path of one rank's shard file."""
    return f"shards/rank-{rank:05d}.safetensors"


def check_path(path: str) -> None:
    """Raise ArchiveError (F2) unless ``path`` is relative and stays below the folder it is joined to."""
    bad = (
        not path
        or len(path) > MAX_PATH
        or not path.isprintable()
        or "\\" in path
        or ":" in path
        or any(part in ("", ".", "..") for part in path.split("/"))
    )
    if bad:
        shown = repr(path[:80])
        raise ArchiveError(f"path {shown}; expected a relative path inside the archive, parts joined by '/'", rule="F2")


def open_inside(root: Path, path: str) -> BinaryIO:
    """Open a listed file for reading; never blocks (on a pipe) and never leaves ``root``.

    Raises:
        ArchiveError: F2 (leaves the folder), F3 (not there, or not a regular file).
    """
    check_path(path)
    full = root / path
    try:
        real = Path(os.path.realpath(full, strict=True))
    except (OSError, ValueError) as error:
        raise ArchiveError(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}", rule="F3") from None
    if not real.is_relative_to(os.path.realpath(root)):
        raise ArchiveError(f"{path!r} is a link to {str(real)!r}, outside the archive", rule="F2")
    try:
        descriptor = os.open(real, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise ArchiveError(f"cannot open {path!r}: {error.strerror}", rule="F3") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArchiveError(f"{path!r} is not a regular file", rule="F3")
    return os.fdopen(descriptor, "rb")


def read_inside(root: Path, path: str, limit: int | None = None) -> bytes:
    """The bytes of a listed file, at most ``limit`` + 1 of them when a limit is given."""
    with open_inside(root, path) as file:
        return file.read() if limit is None else file.read(limit + 1)


def read_manifest_text(root: Path) -> bytes:
    """The bytes of an archive's manifest.json; raises ArchiveError (F1) for a folder that is no archive."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ArchiveError(f"{str(root)!r} {what}; expected an archive folder with manifest.json", rule="F1")
    if (root / ".metadata").exists():
        raise ArchiveError(
            f"{str(root)!r} is a checkpoint, not an archive; `recinfer export` makes one of it", rule="F1"
        )
    try:
        return read_inside(root, "manifest.json", MAX_JSON_BYTES)
    except ArchiveError as error:
        raise ArchiveError(f"{str(root)!r} is not an archive: {error}", rule="F1") from None


def file_sha256(file: BinaryIO) -> str:
    """The SHA-256 (hex) of an open file from its current position, computed in bounded memory."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
