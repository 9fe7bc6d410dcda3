"""The files of a version on disk: what shows that they changed, and which were changed under a server that maps them."""

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
    """What shows a change of a file without reading it; a file that cannot be looked at has zeros.

    Attributes:
        inode: another one where the file was replaced by another file of that name.
        size: bytes.
        changed_ns: time of the last change of its content.
        is_readable: whether this process may read it.
    """

    inode: int
    size: int
    changed_ns: int
    is_readable: bool


Fingerprint = Mapping[str, FileState]
"""Of all files of a folder, by path below it."""


def fingerprint(folder: Path) -> Fingerprint | None:
    """Of the files as they are now; None where one disappears meanwhile."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                stat = os.stat(path)
                state = FileState(stat.st_ino, stat.st_size, stat.st_mtime_ns, os.access(path, os.R_OK))
            except FileNotFoundError:
                return None
            except OSError:  # its folder may be opened later
                state = FileState(0, 0, 0, False)
            found[os.path.relpath(path, folder)] = state
    return found


def changed_in_place(
    folder: Path, manifest_sha256: str, loaded: Fingerprint, now: Fingerprint, before: Collection[str] = ()
) -> list[str]:
    """Shard files of a served version that have another content than the one that was loaded, under the same inode.

    A server that maps such a file reads the new bytes as rows of the old version. A file that was replaced by another one
    is none of these: the old one stays as long as it is mapped.

    Args:
        manifest_sha256: of the version as it is served.
        loaded: the files when it was loaded.
        before: what the last look found; such a file stays one until its content is back in place.
    """
    found, listed = [], _hashes(folder, manifest_sha256)
    for path, state in loaded.items():
        if not path.startswith("shards" + os.sep):
            continue
        is_ = now.get(path)
        if is_ is None or is_.inode != state.inode:
            if path in before:
                found.append(path)
        elif (is_.size, is_.changed_ns) != (state.size, state.changed_ns) and not _has(folder, path, listed.get(path)):
            found.append(path)
    return found


def _hashes(folder: Path, manifest_sha256: str) -> dict[str, str]:
    """The hashes that the manifest lists by path; none where the manifest on disk is another one."""
    try:
        text = (folder / "manifest.json").read_bytes()
        if hashlib.sha256(text).hexdigest() != manifest_sha256:
            return {}
        return {file.path: file.sha256 for file in read_manifest(text).files}
    except (OSError, ArchiveError):
        return {}


def _has(folder: Path, path: str, sha256: str | None) -> bool:
    """Whether the file has that content."""
    if sha256 is None:
        return False
    try:
        with open_inside(folder, path) as file:
            return file_sha256(file) == sha256
    except (OSError, ArchiveError):
        return False
