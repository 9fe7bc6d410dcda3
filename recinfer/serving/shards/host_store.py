"""The model store of a shard server: finds the archives and deltas that rankers name."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from recinfer.errors import InputError, NotFoundError
from recinfer.remote.store import StoreMirror
from recinfer.serving.shards.versions import version_key

__all__ = ["HostStore"]


class HostStore:
    """A folder of the host, or the mirror of a store behind a URL, from which files are downloaded. Any thread may call it.

    Args:
        folder: of the store, or of its mirror.
        mirror: of a store behind a URL; it downloads the ranks of this server alone.
    """

    def __init__(self, folder: Path, mirror: StoreMirror | None = None) -> None:
        self._folder = folder
        self._mirror = mirror

    def archive(self, name: str, key: str | None = None) -> tuple[Path, Callable[[], None]]:
        """The archive in the folder ``name`` of the store.

        Args:
            key: the key of its content, see :func:`version_key`; nothing else is downloaded. None: any content.

        Returns:
            Its folder, and the function that ends its use.

        Raises:
            NotFoundError: the store has no such folder, or a mirrored one has another content.
            InputError: the name leads out of the store.
            ArchiveError, ConfigError, UnavailableError: see :meth:`StoreMirror.archive` and :meth:`StoreMirror.refresh`.
        """
        if self._mirror is None:
            return self._inside(name), lambda: None
        model, version = self._two(name)
        if key is not None and self._mirrored_key(name) != key:
            self._mirror.refresh()
            if self._mirrored_key(name) != key:
                raise NotFoundError(f"version: {name} of {self._mirror.url} is not {key}; upload it there")
        cached = self._mirror.archive(model, version)
        return cached.path, cached.release

    def delta(self, name: str) -> Path:
        """The file of a delta, downloaded from a store behind a URL; raises as :meth:`archive`."""
        if self._mirror is None:
            return self._inside(name)
        return self._mirror.delta(*self._two(name))

    def _mirrored_key(self, name: str) -> str | None:
        try:
            manifest = (self._folder / name / "manifest.json").read_bytes()
        except OSError:
            return None
        return version_key(hashlib.sha256(manifest).hexdigest())

    def _two(self, name: str) -> tuple[str, str]:
        """The model and the file or version of a name in a mirrored store."""
        parts = _parts(name)
        if len(parts) != 2:
            assert self._mirror is not None
            raise NotFoundError(
                f"version: got {name[:80]!r}, expected <model>/<version> of {self._mirror.url}; the ranker's archive is not in "
                "the store that this server has"
            )
        self._inside(name, must_exist=False)
        return parts[0], parts[1]

    def _inside(self, name: str, *, must_exist: bool = True) -> Path:
        path = self._folder.joinpath(*_parts(name))
        try:
            leads_out, exists = not path.resolve().is_relative_to(self._folder.resolve()), path.exists()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            text = f"folder: got {name[:80]!r}... ({len(name)} characters), which is longer than a file's name can be"
            raise InputError(text) from None
        if leads_out:
            raise InputError(f"folder: {name[:80]!r} leads out of the store")
        if must_exist and not exists:
            raise NotFoundError(f"version: the store of this host has no {name[:80]!r}; copy it here")
        return path


def _parts(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    if not parts or any(part in ("..", "/") or "\0" in part for part in parts):
        raise InputError(f"folder: got {name[:80]!r}, expected a path inside the store")
    return parts
