"""Identifies a version between ranker and shard servers by its content, not its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recinfer.archive.delta import Delta
from recinfer.archive.reader import Archive

__all__ = ["VersionSpec", "base_of", "version_key"]

_DIGITS = 32
_SHOWN_DIGITS = 12  # in messages


def version_key(manifest_sha256: str, deltas: Sequence[Delta] = ()) -> str:
    """The key of a version's content: the start of the manifest's SHA-256; after deltas, also their number and the
    last's SHA-256.

    The manifest lists the hashes of all files, and a delta names its predecessor, so equal keys mean equal rows.
    """
    base = manifest_sha256[:_DIGITS]
    return f"{base}+{len(deltas)}:{deltas[-1].sha256[:_DIGITS]}" if deltas else base


def base_of(key: str) -> str:
    """The key of the archive that the deltas of ``key`` were applied to."""
    return key.partition("+")[0]


@dataclass(frozen=True)
class VersionSpec:
    """A version and where a shard server finds it.

    Attributes:
        key: see :func:`version_key`.
        folder: folder of the archive, below the server's store.
        deltas: files below the store, in their order.
        world_size: number of ranks of the archive's plan.
    """

    key: str
    folder: str
    deltas: tuple[str, ...] = ()
    world_size: int = 0

    def __str__(self) -> str:
        """The folder, its deltas, and the start of its key."""
        after = "".join(f" + {delta.rpartition('/')[2]}" for delta in self.deltas)
        return f"{self.folder}{after} ({self.key[:_SHOWN_DIGITS]})"

    @classmethod
    def of(
        cls, archive: Archive, deltas: Sequence[Delta], store: str | None = None, folder: str | None = None
    ) -> VersionSpec:
        """The version of ``archive`` after ``deltas``; paths below ``store`` become relative to it, other paths their
        last part.

        Args:
            folder: the archive's folder below the store, where it is not the archive's own: archives of a store behind a URL
                are in the cache.
        """
        root = None if store is None else Path(store).resolve()

        def name(path: Path) -> str:
            whole = path.resolve()
            return whole.relative_to(root).as_posix() if root and whole.is_relative_to(root) else whole.name

        files = tuple(name(delta.path) for delta in deltas if delta.path is not None)
        key = version_key(archive.manifest_sha256, deltas)
        return cls(key, folder or name(archive.root), files, archive.manifest.world_size)
