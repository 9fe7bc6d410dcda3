"""A model store: archives ``<model>/<version>/`` and deltas ``<model>/*.rqd``; and a server's changes from it."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from recinfer.errors import ArchiveError, ConfigError, InputError, NotFoundError, RecinferError, UnavailableError
from recinfer.inference.predictor import Predictor, load
from recinfer.remote.store import StoreMirror
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.state import ServedState, ServedVersion
from recinfer.serving.engine.store_folder import StoreFolder

__all__ = ["UNSOUND", "ModelStore", "StoreManager", "restore", "served_state"]

T = TypeVar("T")
P = TypeVar("P", bound=Predictor)
UNSOUND = (ArchiveError, NotFoundError, UnavailableError)
"""Errors of one version, whose damaged or missing files do not concern others: a mirrored version is downloaded first."""
_MAX_NAME = 255  # bytes of a file's name
_log = logging.getLogger(__name__)


class ModelStore:
    """Archives on disk by model and version. Any thread may call it.

    Args:
        folder: holds ``<model>/<version>/manifest.json``.
        mirror: of a store behind a URL, whose folder is ``folder``; archives and deltas are downloaded when they are opened.
        load_options: further arguments of recinfer.inference.predictor.load (``device``, ``preload``, ``lookups`` ...).

    Attributes:
        folder, mirror: as given.

    Raises:
        ConfigError: ``folder`` is no folder.
    """

    def __init__(self, folder: Path, mirror: StoreMirror | None = None, **load_options: Any) -> None:
        if not folder.is_dir():
            raise ConfigError(f"model store {folder} is not a folder")
        self.folder = folder
        self._load_options = load_options
        self.mirror = mirror
        self._listed = StoreFolder(folder)

    def refresh(self) -> None:
        """Read a store behind a URL again; raises UnavailableError or ConfigError if it cannot be read."""
        if self.mirror is not None:
            self.mirror.refresh()

    def models(self) -> list[str]:
        """Names of the models that have a version; a folder that cannot be read, such as a disk's lost+found, has none.

        Raises:
            UnavailableError: the store itself cannot be read.
        """
        try:
            return [name for name in self._listed.models() if self.versions(name)]
        except OSError as error:
            raise UnavailableError(f"model store {self.folder} cannot be read: {error.strerror}") from None

    def versions(self, model: str) -> list[str]:
        """The readable versions of a model, the newest (the highest number) first."""
        self._inside(self.folder, model)
        return list(self._listed.readable(model))

    def open(self, model: str, version: str) -> Predictor:
        """Map, check and warm a version: every golden request is replayed.

        Raises:
            NotFoundError: the store lacks the version.
            ArchiveError: the archive breaks a rule of the format, or answers a golden request wrongly.
        """
        if version not in self.versions(model):
            known = ", ".join(self.versions(model)) or "none"
            raise NotFoundError(f"version: the store has no {version[:80]!r} of model {model[:80]!r}; it has {known}")
        predictor = self.opened(model, version, lambda path: load(path, check_hashes=True, **self._load_options))
        for index in range(predictor.manifest.check.num_requests):
            predictor.check_request(index)
        return predictor

    def opened(self, model: str, version: str, opens: Callable[[Path], P]) -> P:
        """The result of ``opens`` for a version's folder, which is downloaded before, and held until the result is freed."""
        path = self._inside(self._inside(self.folder, model), version)
        if self.mirror is None:
            return opens(path)
        cached = self.mirror.archive(model, version)
        try:
            made = opens(cached.path)
        except BaseException:
            cached.release()
            raise
        weakref.finalize(made, cached.release)
        return made

    def manifest_sha256(self, model: str, version: str) -> str | None:
        """The SHA-256 of a version's manifest; None if the manifest is unreadable."""
        try:
            data = (self._inside(self._inside(self.folder, model), version) / "manifest.json").read_bytes()
        except OSError:
            return None
        return hashlib.sha256(data).hexdigest()

    def delta(self, model: str, name: str) -> Path:
        """The file of a delta; raises NotFoundError, or InputError for a name that leads out of the model's folder."""
        path = self._inside(self._inside(self.folder, model), name)
        if self.mirror is not None:
            return self.mirror.delta(model, name)
        if path.suffix != ".rqd" or not path.is_file():
            found = ", ".join(sorted(file.name for file in path.parent.glob("*.rqd"))) or "none"
            raise NotFoundError(f"delta: the store has no {name[:80]!r} of model {model[:80]!r}; it has {found}")
        return path

    def newest_of_all(
        self,
        opens: Callable[[str, str], T],
        broken: type[RecinferError] | tuple[type[RecinferError], ...] = RecinferError,
        *,
        needed: bool = True,
        every: bool = False,
        choose: Callable[[str, list[str]], list[str]] = lambda _, versions: versions,
    ) -> list[T]:
        """Open the newest sound version of each model; a version for which ``opens`` raises is logged and passed over.

        Args:
            opens: (model, version) -> the result for a sound version.
            broken: the types of RecinferErrors that mean an unsound version; other RecinferErrors are raised. Any other
                exception means an unsound version too.
            needed: raise where no model has a sound version, instead of returning nothing.
            every: open all versions that ``choose`` returns, instead of the newest alone.
            choose: (model, versions) -> the versions that may be tried, in order.

        Returns:
            The results of ``opens``; those of one model in a row, the newest first.

        Raises:
            ConfigError: the store has models, and no sound version of any; the message has the error of each.
        """
        found, unsound = [], []
        for model in self.models():
            reasons, sound = [], 0
            for version in choose(model, self.versions(model)):
                try:
                    found.append(opens(model, version))
                    sound += 1
                    if not every:
                        break
                except Exception as error:
                    own = isinstance(error, RecinferError)
                    if own and not isinstance(error, broken):
                        raise
                    reason = str(error) if own or isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    _log.error("model store: %s %s is not served: %s", model, version, reason)
                    reasons.append(f"{version}: {reason}")
            if reasons and not sound:
                unsound.append(f"model store: model {model[:80]!r} has no version to serve: {'; '.join(reasons)}")
        if unsound and needed and not found:
            raise ConfigError("; ".join(unsound))
        return found

    @staticmethod
    def _inside(folder: Path, name: str) -> Path:
        odd = not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name
        if odd or len(os.fsencode(name)) > _MAX_NAME:
            raise InputError(f"model and version: got {name[:80]!r}, expected the name of a folder of the model store")
        return folder / name


class StoreManager:
    """Changes a registry from a store, one change at a time. Thread-safe.

    Args:
        restored: the state that this process began with, see :func:`restore`.
    """

    def __init__(self, registry: ModelRegistry, store: ModelStore, restored: ServedState | None = None) -> None:
        self.registry = registry
        self.store = store
        self._lock = threading.Lock()
        # The recorded changes of versions by deltas, by model and version.
        self._changed: dict[tuple[str, str], ServedVersion] = {}
        if restored is not None:
            registry.restore(restored.spreads)
            self._changed = {(served.model, served.version): served for served in restored.versions}

    def state(self) -> ServedState:
        """The served models, with which another process can begin."""
        with self._lock:
            return served_state(self.registry, self._changed)

    def load(self, model: str, version: str = "", *, activate: bool = False) -> str:
        """Serve a version of the store (empty: the newest), with ``activate`` also as the default version; returns its name.

        The registry changes only after all checks of the archive. A version that is served already stays as it is.

        Raises:
            NotFoundError: the store lacks the model or version, also a served one.
            InputError: the archive is broken, or differs from the archive that is served under its version.
        """
        self.store.refresh()
        with self._lock:
            version = version or self.newest_version(model)
            if not version:
                known = ", ".join(map(repr, self.store.models())) or "no model"
                raise NotFoundError(f"model: the store has no version of {model[:80]!r}; it has {known}")
            if model in self.registry.names() and version in self.registry.versions(model):
                self._check_same(model, version)
            else:
                try:
                    predictor = self.store.open(model, version)
                except (ArchiveError, ConfigError) as error:
                    raise InputError(f"version: {version!r} of model {model!r} is not served: {error}") from None
                self.registry.add(ServedModel.of(model, predictor, version))
            if activate:
                self.registry.set_weights(model, {version: 1})
            return version

    def _check_same(self, model: str, version: str) -> None:
        """Raise InputError if the store's archive of a served version is another one by now, NotFoundError if it is gone."""
        served = self.registry.get(model, version).predictor.content[0]
        on_disk = self.store.manifest_sha256(model, version)
        if on_disk is None:
            raise NotFoundError(
                f"version: {version!r} of model {model!r} is served, and the store has no archive of it that can be read any more; "
                "copy it back, or send requests to the served version with `recinfer admin weights`"
            )
        if on_disk != served:
            raise InputError(
                f"version: {version!r} of model {model!r} is served, and the archive in the store is another one by now "
                f"(manifest {on_disk[:12]}, served {served[:12]}); give it a version of its own, or unload this one first"
            )

    def apply_delta(self, model: str, version: str, name: str) -> None:
        """Apply a delta of the store to a served version, while it answers requests.

        The version changes only after all checks of the delta. Raises InputError (also for a delta that is broken or does
        not fit), NotFoundError, UnavailableError.
        """
        with self._lock:
            served = self._named_or_default(model, version)
            path = self.store.delta(served.name, name)
            try:
                served.predictor.apply_delta(path)
            except ArchiveError as error:
                raise InputError(f"delta: {name!r} is not applied to {served.name} {served.version}: {error}") from None
            record = self._record(served)
            self._changed[served.name, served.version] = replace(record, deltas=(*record.deltas, name))

    def undo_delta(self, model: str, version: str) -> None:
        """Undo the last delta of a served version; raises InputError, NotFoundError."""
        with self._lock:
            served = self._named_or_default(model, version)
            served.predictor.undo_delta()
            record = self._record(served)
            undone = record.undone if record.deltas else record.undone + 1
            self._changed[served.name, served.version] = replace(record, deltas=record.deltas[:-1], undone=undone)

    def _record(self, served: ServedModel) -> ServedVersion:
        """The recorded changes of a version by deltas; its ``content`` is that of the first record."""
        return self._changed.get((served.name, served.version)) or _served_version(served)

    def _named_or_default(self, model: str, version: str) -> ServedModel:
        """A version by name (empty: the only version to which requests without a version go)."""
        if not version:
            version, *others = self.registry.weights(model)
            if others:
                raise InputError(f"version: got none, and requests go to {version!r} and {others[0]!r}; name one")
        return self.registry.get(model, version)

    def newest_version(self, model: str) -> str:
        """The newest version of a model in the store, or an empty string."""
        return next(iter(self.store.versions(model)), "")

    def unload(self, model: str, version: str) -> None:
        """Stop serving a version; its memory is freed when the last request on it has ended.

        No garbage collection is needed: a predictor is in no reference cycle. A full collection would delay all requests,
        by a second on a busy machine, since torch has many objects.
        """
        with self._lock:
            name = self.registry.get(model, version).name
            self.registry.remove(name, version)
            self._changed.pop((name, version), None)


def served_state(
    registry: ModelRegistry, changed: Mapping[tuple[str, str], ServedVersion] = MappingProxyType({})
) -> ServedState:
    """The state that :func:`restore` takes.

    Args:
        changed: the recorded changes of versions by deltas, by model and version.
    """
    versions = []
    for name in registry.names():
        for version, model in registry.versions(name).items():
            now, record = _served_version(model), changed.get((name, version))
            versions.append(now if record is None else replace(now, deltas=record.deltas, undone=record.undone))
    return ServedState(tuple(versions), registry.spreads())


def _served_version(model: ServedModel) -> ServedVersion:
    """The version with its content now, without recorded deltas."""
    return ServedVersion(model.name, model.version, tuple(model.predictor.content))


def restore(state: ServedState, loaded: Iterable[ServedModel], store: ModelStore | None) -> list[ServedModel]:
    """The versions of ``state``, from ``loaded`` or else from the store, with their deltas.

    A version that is gone from the disk, or has another content by now, is logged and left out: all workers give one answer
    under one name. A model without a version that has a weight is left out too.

    Args:
        store: None: all served versions are in ``loaded``, or gone.

    Raises:
        UnavailableError: the default model would be left out: requests without a name would go to another model.
    """
    here = {(model.name, model.version): model for model in loaded}
    models: list[ServedModel] = []
    lost: dict[str, list[str]] = {}
    for served in state.versions:
        name, version = served.model, served.version
        try:
            model = here.get((name, version)) or _open_version(store, name, version)
            models.append(_with_recorded_deltas(model, served, store))
        except (ArchiveError, InputError, NotFoundError) as error:
            _log.error("%s %s is not served by this process: %s", name, version, error)
            lost.setdefault(name, []).append(f"{version}: {error}")
    weighed = {model.name for model in models if model.version in state.weights_of(model.name)}
    default = state.versions[0].model
    if default not in weighed:
        why = "; ".join(lost.get(default, []))
        raise UnavailableError(f"model {default!r} is not on disk any more as the other workers serve it: {why}")
    for name in lost.keys() - weighed:
        _log.error("%s is not served by this process: its default version is not there", name)
    return [model for model in models if model.name in weighed]


def _open_version(store: ModelStore | None, name: str, version: str) -> ServedModel:
    if store is None:
        raise NotFoundError("none of the archives is that version any more")
    return ServedModel.of(name, store.open(name, version), version)


def _with_recorded_deltas(model: ServedModel, served: ServedVersion, store: ModelStore | None) -> ServedModel:
    """``model`` with its recorded deltas; raises ArchiveError (X5) unless it is the served version's content then."""
    for _ in range(served.undone):
        model.predictor.undo_delta()
    for delta in served.deltas:
        assert store is not None, "deltas by name are a store's"
        model.predictor.apply_delta(store.delta(model.name, delta))
    content = tuple(model.predictor.content)
    if content != served.content:
        what = "archive" if content[0] != served.content[0] else "delta"
        other = "restart the server" if store is None else "unload the version and load it again"
        raise ArchiveError(
            f"the {what} on disk is not the one that the other workers serve under this version; "
            f"give it a version of its own, or {other}",
            rule="X5",
        )
    return model
