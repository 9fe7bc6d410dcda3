"""A model store behind a URL, and its mirror on disk: the manifests of all versions, and archives on request."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from recinfer.errors import ArchiveError, NotFoundError, RecinferError
from recinfer.excerpts import quoted, some
from recinfer.files import naming, write_file
from recinfer.remote.cache import ArchiveCache, CachedArchive
from recinfer.remote.location import Location, mirror_folder
from recinfer.strict_json import MAX_JSON_BYTES

__all__ = ["StoreMirror"]

# A damaged version is downloaded again when its files change, or after this time: some storages do not tell of a change.
_AGAIN_S = 600.0
_STAMPS = ".stamps.json"  # names with a dot are no models


class StoreMirror:
    """The folder that stands for a model store behind a URL. Any thread may call it, and processes may share it.

    The folder has ``<model>/<version>/manifest.json`` of each version, so that a server sees what the store has;
    :meth:`archive` downloads a version when it is loaded.

    Args:
        url: the store, with archives at ``<model>/<version>``.
        wanted: whether a file of an archive is needed; other files are not downloaded.

    Attributes:
        url: of the store, as messages show it.
        folder: the mirror.

    Raises:
        ConfigError: as Location.
    """

    def __init__(self, url: str, cache: ArchiveCache, wanted: Callable[[str], bool] = lambda _: True) -> None:
        self._location = Location(url)
        self._cache = cache
        self._wanted = wanted
        self.url = self._location.url
        self.folder = mirror_folder(url, cache.folder)
        self._lock = threading.Lock()
        # By version and manifest: the time, the stamp of the files, and the error.
        self._damaged: dict[tuple[str, str, bytes], tuple[float, str, str]] = {}

    def refresh(self) -> None:
        """Make the mirror's manifests those of the store now.

        Raises:
            NotFoundError, ConfigError, UnavailableError: the store cannot be read; the mirror is unchanged.
        """
        with self._lock, naming(self.folder):
            found = self._location.archives()
            known = self._stamps()
            stamps: dict[str, str] = {}
            for (model, version), stamp in found.items():
                name = f"{model}/{version}"
                path = self.folder / model / version / "manifest.json"
                if not stamp or known.get(name) != stamp or not path.is_file():
                    try:
                        text = self._location.read(f"{name}/manifest.json", MAX_JSON_BYTES + 1)
                    except NotFoundError:  # removed since it was listed
                        continue
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if not path.is_file() or path.read_bytes() != text:
                        write_file(path, text)
                stamps[name] = stamp
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_others(set(stamps))
            write_file(self.folder / _STAMPS, json.dumps(stamps).encode())

    def archive(self, model: str, version: str) -> CachedArchive:
        """The archive of a version, downloaded unless the cache has it; raises as :meth:`ArchiveCache.archive`."""
        try:
            text = (self.folder / model / version / "manifest.json").read_bytes()
        except OSError:
            text = b""
        if not text:
            raise NotFoundError(f"version: {self._location.url} has no {quoted(version)} of model {quoted(model)}")
        key = (model, version, hashlib.sha256(text).digest())
        since, stamp, why = self._damaged.get(key, (0.0, "", ""))
        # Taken before a download, so that files which are uploaded meanwhile count as changed. The first download has none: the
        # next call repeats it once, but an archive that the cache has needs no storage.
        now = self._stamp_of(model, version) if why else ""
        if why and now == stamp and time.monotonic() - since < _AGAIN_S:
            raise ArchiveError(why)
        try:
            return self._cache.archive(self._location, f"{model}/{version}", manifest=text, wanted=self._wanted)
        except ArchiveError as error:  # each poll would download the damaged file again
            self._damaged[key] = (time.monotonic(), now, str(error))
            raise

    def folder_of(self, manifest_sha256: str) -> str | None:
        """``<model>/<version>`` of an archive of the store, by the SHA-256 of its manifest; None if the mirror has none."""
        for path in sorted(self.folder.glob("*/*/manifest.json")):
            try:
                found = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:  # removed since it was listed
                continue
            if found == manifest_sha256:
                return f"{path.parent.parent.name}/{path.parent.name}"
        return None

    def delta(self, model: str, name: str) -> Path:
        """The file of a delta, downloaded; raises NotFoundError, and else as :meth:`refresh`."""
        try:
            names = self._location.names(model, ".rqd")
        except NotFoundError:
            names = []
        if name not in names:
            raise NotFoundError(
                f"delta: the store has no {quoted(name)} of model {quoted(model)}; it has {some(names, none='none')}"
            )
        path = self.folder / model / name
        with self._lock, naming(self.folder):  # downloaded each time: a delta may have been uploaded anew
            text = self._location.read_range(f"{model}/{name}", 0, None)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text)
        return path

    def _stamp_of(self, model: str, version: str) -> str:
        """See :meth:`Location.stamp`; empty too where the storage gives no answer."""
        try:
            return self._location.stamp(f"{model}/{version}")
        except RecinferError:
            return ""

    def _stamps(self) -> dict[str, str]:
        try:
            stamps = json.loads((self.folder / _STAMPS).read_bytes())
        except (OSError, ValueError):
            return {}
        return stamps if isinstance(stamps, dict) else {}

    def _remove_others(self, names: set[str]) -> None:
        """Remove the versions that are not in ``names``, and models without any version and delta."""
        for model in os.scandir(self.folder):
            if not model.is_dir():
                continue
            for version in os.scandir(model):
                if version.is_dir() and f"{model.name}/{version.name}" not in names:
                    shutil.rmtree(version, ignore_errors=True)
            if not any(os.scandir(model)):
                os.rmdir(model)
