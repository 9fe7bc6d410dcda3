"""Lists a model store: the models and versions in it that this user can read."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FoundVersions", "StoreFolder", "natural"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundVersions:
    """The versions that one look at the folder of a model found.

    Attributes:
        readable: version -> its folder, the newest first.
        unreadable: versions whose folder cannot be read, and may or may not hold an archive.
        is_empty: whether the folder has no entry at all, as the mount point of a lost disk.
    """

    readable: Mapping[str, Path]
    unreadable: frozenset[str] = frozenset()
    is_empty: bool = False


class StoreFolder:
    """Models and versions below a folder, ``<model>/<version>/manifest.json``; names that begin with a dot are passed over.

    A folder that cannot be read, or whose name is no UTF-8 (messages could not carry it), is passed over, and logged once
    until the reason changes. Any thread may call it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logged: dict[Path, str] = {}  # the logged reason by path

    def models(self) -> list[str]:
        """Names of the folders that may hold models, sorted; raises OSError where the store itself cannot be read."""
        found = []
        for name in self._names(self.path):
            try:
                if (self.path / name).is_dir():
                    found.append(name)
            except OSError as error:
                self._cannot_read(self.path / name, error)
        return found

    def versions(self, model: str) -> FoundVersions:
        """The versions of a model on disk; raises OSError if its folder is missing or cannot be read."""
        folder = self.path / model
        names, readable, unreadable = self._names(folder), {}, set()
        for name in sorted(names, key=natural, reverse=True):
            manifest = folder / name / "manifest.json"
            try:
                if not manifest.is_file():
                    continue
                with manifest.open("rb"):
                    readable[name] = folder / name
            except OSError as error:
                unreadable.add(name)
                self._cannot_read(folder / name, error)
            else:
                self._logged.pop(folder / name, None)
        return FoundVersions(readable, frozenset(unreadable), is_empty=not names and not any(folder.iterdir()))

    def readable(self, model: str) -> dict[str, Path]:
        """The readable versions of a model, the newest first; empty if its folder is missing or cannot be read."""
        try:
            return dict(self.versions(model).readable)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self._cannot_read(self.path / model, error)
            return {}

    def _names(self, folder: Path) -> list[str]:
        """Names in ``folder`` that a message can carry; raises OSError."""
        names = []
        for name in sorted(os.listdir(folder)):
            if name[0] == ".":
                continue
            if "\\" in name or any("\udc80" <= char <= "\udcff" for char in name):  # bytes that are no UTF-8
                self._log_once(
                    folder / name, "has a name that no request can have (no UTF-8, or with a backslash): rename it"
                )
            else:
                names.append(name)
        return names

    def _cannot_read(self, path: Path, error: OSError) -> None:
        self._log_once(path, f"cannot be read, so it holds no model: {error.strerror}")

    def _log_once(self, path: Path, why: str) -> None:
        if self._logged.get(path) != why:
            self._logged[path] = why
            _log.warning("model store: %s %s", str(path).encode(errors="backslashreplace").decode(), why)


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that puts "10" after "9" and "v2" after "v1"; the name orders equal numbers ("01", "1")."""
    parts = re.findall(r"\d+|\D+", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts], name
