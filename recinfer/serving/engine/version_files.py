"""The files of a version on disk: fingerprints show a change in place under a server that maps them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from recinfer.archive.manifest_rules import read_manifest
from recinfer.archive.paths import file_sha256, open_inside
from recinfer.errors import ArchiveError

__all__ = ["FileState", "Fingerprint", "changed_in_place", "fingerprint"]


class FileState(NamedTuple):
    """The attributes that show a change of a file without reading it; zeros for a file whose attributes cannot be read.

    Attributes:
        inode: number of the file; a file that replaces it under the same name has another.
        size: bytes.
        changed_ns: time of the last change of its content.
        is_readable: whether this process may read it.
    """

    inode: int
    size: int
    changed_ns: int
    is_readable: bool


Fingerprint = Mapping[str, FileState]
"""The states of all files of a folder, by path relative to the folder."""


def fingerprint(folder: Path) -> Fingerprint | None:
    """The fingerprint of the files in ``folder`` now; None if a file disappears meanwhile."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                stat = os.stat(path)
                state = FileState(stat.st_ino, stat.st_size, stat.st_mtime_ns, os.access(path, os.R_OK))
            except FileNotFoundError:
                return None
            except OSError:  # the folder may become readable later
                state = FileState(0, 0, 0, False)
            found[os.path.relpath(path, folder)] = state
    return found


def changed_in_place(
    folder: Path, manifest_sha256: str, loaded: Fingerprint, now: Fingerprint, before: Collection[str] = ()
) -> list[str]:
    """Shard files of a served version whose content under the same inode is not the loaded content.

    A server that maps such a file reads the new bytes as rows of the old version. A file that was replaced by another file
    does not count: the old file stays as long as it is mapped.

    Args:
        manifest_sha256: hash of the served version's manifest.
        loaded: the files when the version was loaded.
        now: the files now.
        before: the result of the last look; a file stays in the result until its content is back in place.
    """
    found, listed = [], _hashes(folder, manifest_sha256)
    for path, state in loaded.items():
        if not path.startswith("shards" + os.sep):
            continue
        current = now.get(path)
        if current is None or current.inode != state.inode:
            if path in before:
                found.append(path)
        elif (current.size, current.changed_ns) != (state.size, state.changed_ns) and not _has_content(
            folder, path, listed.get(path)
        ):
            found.append(path)
    return found


def _hashes(folder: Path, manifest_sha256: str) -> dict[str, str]:
    """The hashes that the manifest lists, by path; empty if the manifest on disk has another hash."""
    try:
        text = (folder / "manifest.json").read_bytes()
        if hashlib.sha256(text).hexdigest() != manifest_sha256:
            return {}
        return {file.path: file.sha256 for file in read_manifest(text).files}
    except (OSError, ArchiveError):
        return {}


def _has_content(folder: Path, path: str, sha256: str | None) -> bool:
    """Whether the content of the file has the hash ``sha256``; False for None."""
    if sha256 is None:
        return False
    try:
        with open_inside(folder, path) as file:
            return file_sha256(file) == sha256
    except (OSError, ArchiveError):
        return False
