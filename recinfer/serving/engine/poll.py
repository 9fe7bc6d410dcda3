"""Follows a model store on disk: versions that appear are loaded, versions that disappear are unloaded."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recinfer.errors import ConfigError, RecinferError
from recinfer.remote.store import StoreMirror
from recinfer.serving.engine.admin import SET_FAULT
from recinfer.serving.engine.change_log import BY_POLLING
from recinfer.serving.engine.model_config import ModelChoice, parse_model_config, read_text
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.engine.state import ServedState
from recinfer.serving.engine.store_folder import FoundVersions, StoreFolder, natural
from recinfer.serving.engine.version_files import Fingerprint, changed_in_place, fingerprint
from recinfer.serving.wire.proto import admin_pb2 as pb

__all__ = ["PollLoop", "StorePoller"]

_log = logging.getLogger(__name__)
_STOPPED_S = 0.1  # between two checks whether to stop
_SETTLED_S = 1.0  # a configuration file that was written later than this may be half
_SERVE_ALL = ModelChoice()
_SERVE_NONE = ModelChoice(latest=0)
_NONE_SERVED = ServedState((), {})
_TRY_AGAIN: Fingerprint = {}  # differs from every fingerprint, as each archive has files


class StorePoller:
    """Compares a store with the served versions on request, and makes the changes. One thread at a time may call it.

    A version is tried once. A refused version is tried again when its files have changed; a ranker tries it at each look,
    since its shard servers have files of their own and may get them later. A version becomes the default when it is loaded
    and is newer than all served versions, unless the configuration has weights. Changes by an operator (rollback, weights,
    unload) stay. Versions from outside the store are left alone.

    A version is unloaded when its folder is gone. A version stays when its folder cannot be read, and when the store or the
    folder of its model is empty, as after the loss of a mounted disk. A version whose mapped files are changed in place gets
    a fault.

    Args:
        folder: the store.
        change: (name, serialized request) -> makes an admin call; raises RecinferErrors.
        state: returns the served models now; None: unknown now.
        config: a file of recinfer.serving.engine.model_config, which is read at each look.
        is_ranker: the tables of the versions are on shard servers.
        mirror: of a store behind a URL: its manifests are read again at each look, and a version whose download failed is
            tried again.

    Raises:
        ConfigError: the file is bad. Later a bad file is logged, and the last good configuration stays.
    """

    def __init__(
        self,
        folder: Path,
        change: Callable[[str, bytes], object],
        state: Callable[[], ServedState | None],
        config: Path | None = None,
        *,
        is_ranker: bool = False,
        mirror: StoreMirror | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._is_ranker = is_ranker
        self._mirror = mirror
        self._tries_again = is_ranker or mirror is not None
        self._change = change
        self._state = state
        self._store = StoreFolder(folder)
        self._tried: dict[tuple[str, str], Fingerprint] = {}  # files of each version when it was loaded or refused
        self._loaded: dict[tuple[str, str], Fingerprint] = {}  # files of each served version at the first look
        self._in_place: dict[tuple[str, str], list[str]] = {}  # files of served versions that were changed in place
        # By model, the labels and weights of the configuration that were set.
        self._set: dict[str, tuple[Mapping[str, str], Mapping[str, int]]] = {}
        self._logged: dict[str, str] = {}  # the last logged text by its subject
        self._text: str | None = None
        self._choices: dict[str, ModelChoice] | None = None
        if config is not None:
            text = read_text(config)
            self._choices = self._checked(text)
            self._text = text

    def choice(self, model: str) -> ModelChoice:
        """The versions of a model to serve, with labels and weights."""
        return _SERVE_ALL if self._choices is None else self._choices.get(model, _SERVE_NONE)

    def begin(self, registry: ModelRegistry) -> None:
        """Set the labels and weights of the configuration before models are served, where all its named versions are loaded."""
        for model in registry.names():
            choice = self.choice(model)
            if {*choice.labels.values(), *choice.weights} <= set(registry.versions(model)):
                if choice.labels:
                    registry.set_labels(model, choice.labels)
                if choice.weights:
                    registry.set_weights(model, choice.weights)

    def poll(self, reason: str = "poll") -> None:
        """Look once, and make all changes; a failure is logged once.

        Args:
            reason: the reason of the changes, for the log.
        """
        self._read_config(reason)
        if self._state() is None:
            return
        known = {model for model, _ in self._tried}
        try:
            if self._mirror is not None:
                self._mirror.refresh()
            looks = {model: self._look(model) for model in dict.fromkeys([*self._store.models(), *sorted(known)])}
        except OSError as error:  # a disk may be unavailable for a moment: nothing is unloaded then
            self._log_once("", f"model store: {self.folder} cannot be read, nothing is changed: {error.strerror}")
            return
        except RecinferError as error:
            self._log_once("", f"model store: nothing is changed: {error}")
            return
        if known and not any(look is None or look.readable or look.unreadable for look in looks.values()):
            self._log_once(
                "",
                f"model store: {self.folder} has no version of any model, as where a disk is not mounted: nothing is changed",
            )
            return
        self._logged.pop("", None)
        for model, look in looks.items():
            if look is None:
                continue
            if look.is_empty and model in known:
                self._log_once(
                    model,
                    f"model store: {self.folder / model} is empty, as where a disk is not mounted: its versions are served on; "
                    "remove the folder to unload the model",
                )
                continue
            self._follow(model, look, reason)

    def _look(self, model: str) -> FoundVersions | None:
        """The versions of a model on disk; None if its folder cannot be read, which is logged once."""
        try:
            return self._store.versions(model)
        except FileNotFoundError:
            return FoundVersions({})
        except OSError as error:
            self._log_once(model, f"model store: {self.folder / model} cannot be read: {error.strerror}")
            return None

    def _read_config(self, reason: str) -> None:
        """Apply the configuration file if it has changed and is good; else the last good configuration stays.

        The first half of a file may be a good configuration, which would unload models: a poll leaves a file that was written
        just now to the next one.
        """
        if self.config is None:
            return
        try:
            text = read_text(self.config)
            if text != self._text:
                if reason == "poll" and abs(time.time() - self.config.stat().st_mtime) < _SETTLED_S:
                    return
                self._choices, self._text = self._checked(text), text
                # The end of a reported error is shown where the error was.
                level = logging.WARNING if "config" in self._logged else logging.INFO
                _log.log(level, "model config: %s is taken over", self.config)
        except FileNotFoundError:  # replaced just now
            return
        except ConfigError as error:
            self._log_once("config", f"model config: the server keeps the configuration it has, since {error}")
        else:
            self._logged.pop("config", None)

    def _checked(self, text: str) -> dict[str, ModelChoice]:
        assert self.config is not None
        choices = parse_model_config(text, self.config.name)
        for model, choice in choices.items():
            found = self._store.readable(model)
            if not found:
                raise ConfigError(f"{self.config.name}: models.{model}: the store {self.folder} has no version of it")
            try:
                choice.check(model, list(found))
            except ConfigError as error:
                raise ConfigError(f"{self.config.name}: {error}") from None
        return choices

    def _follow(self, model: str, found: FoundVersions, reason: str) -> None:
        choice = self.choice(model)
        known = {version for name, version in self._tried if name == model}
        # A known version that cannot be read now is not gone.
        here = sorted([*found.readable, *(found.unreadable & known)], key=natural, reverse=True)
        wanted = choice.of(here)
        for version in wanted:
            if version in found.readable:
                self._try(model, version, found.readable[version], choice, reason)
        if self._choices is not None and model in self._choices:
            self._set_labels_and_weights(model, choice, reason)
        known = {version for name, version in self._tried if name == model}
        self._unload(model, known - set(wanted), reason)

    def _try(self, model: str, version: str, path: Path, choice: ModelChoice, reason: str) -> None:
        seen = fingerprint(path)
        key = (model, version)
        if seen is None or self._tried.get(key) == seen:
            return
        served = self._served(model)
        first = key not in self._tried
        self._tried[key] = seen
        if version not in served:
            self._loaded[key] = seen
            self._in_place.pop(key, None)
        elif first:  # served since the server began
            self._loaded[key] = seen
            return
        elif not self._is_ranker and self._notice_fault(model, version, path, seen):  # a ranker maps no tables
            return
        newest = not choice.weights and all(natural(version) > natural(other) for other in served)
        request = pb.LoadRequest(model=model, version=version, activate=newest)
        if not self._try_change("Load", request, f"{model} {version}", reason) and self._tries_again:
            self._tried[key] = _TRY_AGAIN

    def _notice_fault(self, model: str, version: str, path: Path, seen: Fingerprint) -> bool:
        """Whether files of a served version were changed in place; the log and the version's health show transitions."""
        key, before = (model, version), self._in_place.get((model, version), [])
        manifest = next(
            (served.content[0] for served in self._now().versions_of(model) if served.version == version), ""
        )
        found = changed_in_place(path, manifest, self._loaded.get(key, {}), seen, before)
        if found != before:
            why = f"{path / found[0]} was changed in place while it is served" if found else ""
            fault = {"model": model, "version": version, "why": why}
            try:
                self._change(SET_FAULT, json.dumps(fault).encode())
            except RecinferError as error:
                self._tried[key] = _TRY_AGAIN  # at the next look
                self._log_once(
                    f"{model} {version}", f"model store: {why or 'a fault that is mended'}; not noted: {error}"
                )
                return True
            self._in_place[key] = found
            if found:
                _log.error(
                    "model store: %s: lookups of %s %s read another content, so its health is bad from now on; put the old "
                    "content back, or bring up a version under another name and unload this one",
                    *(why, model, version),
                )
            else:
                _log.warning("model store: the files of %s %s are as they were loaded again", model, version)
        return bool(found)

    def _set_labels_and_weights(self, model: str, choice: ModelChoice, reason: str) -> None:
        """Set the labels and weights of the configuration if they have changed and all their versions are served."""
        if self._set.get(model, ({}, {})) == (choice.labels, choice.weights):
            return
        if not {*choice.labels.values(), *choice.weights} <= set(self._served(model)):
            return
        labels = [pb.VersionLabel(label=label, version=version) for label, version in choice.labels.items()]
        done = self._try_change("SetLabels", pb.SetLabelsRequest(model=model, labels=labels), model, reason)
        if done and choice.weights:
            done = self._try_change("SetWeights", _weights_request(model, choice.weights), model, reason)
        if done:
            self._set[model] = (choice.labels, choice.weights)

    def _unload(self, model: str, gone: set[str], reason: str) -> None:
        served = self._served(model)
        for version in gone - set(served):
            self._tried.pop((model, version), None)
        ending = [version for version in served if version in gone]
        if not ending:
            return
        left = [version for version in served if version not in gone]
        weights = self._now().weights_of(model)
        if not left and self._is_default(model):
            keep = max(weights, key=natural)
            self._log_once(
                f"{model} {keep}",
                f"model store: {model} {keep} is gone from disk, and is served on as the model's last version",
            )
            ending, left = [version for version in ending if version != keep], [keep]
        if left and any(version in ending for version in weights):
            kept = {version: weight for version, weight in weights.items() if version not in ending}
            shares = kept or {max(left, key=natural): 1}
            if not self._try_change("SetWeights", _weights_request(model, shares), model, reason):
                return
        # Versions with a weight come last: where no other version is left, their unload removes the model.
        for version in sorted(ending, key=lambda version: version in weights):
            if self._try_change("Unload", pb.UnloadRequest(model=model, version=version), f"{model} {version}", reason):
                for known in (self._tried, self._loaded, self._in_place):
                    known.pop((model, version), None)
                self._logged.pop(f"{model} {version}", None)
                # Labels and weights of other versions are still set: to set them again would change nothing and fill the log.
                labels, known_shares = self._set.get(model, ({}, {}))
                if not left or version in labels.values() or version in known_shares:
                    self._set.pop(model, None)

    def _try_change(self, call: str, request: Any, about: str, reason: str) -> bool:
        """Make a change; returns whether it succeeded. A failure is logged once."""
        request.change.who, request.change.reason = BY_POLLING, reason
        try:
            self._change(call, request.SerializeToString())
        except Exception as error:  # a broken archive may fail anywhere
            why = str(error) if isinstance(error, RecinferError) else f"{type(error).__name__}: {error}"
            when = "at the next look" if self._tries_again else "when the files change"
            self._log_once(about, f"model store: {call} of {about} failed, and is tried again {when}: {why}")
            return False
        self._logged.pop(about, None)
        return True

    def _log_once(self, about: str, text: str) -> None:
        if self._logged.get(about) != text:
            self._logged[about] = text
            _log.error("%s", text)

    def _now(self) -> ServedState:
        return self._state() or _NONE_SERVED

    def _served(self, model: str) -> list[str]:
        return [served.version for served in self._now().versions_of(model)]

    def _is_default(self, model: str) -> bool:
        """Whether requests without a model go to ``model``; they would go to another model after its unload."""
        return any(served.model == model for served in self._now().versions[:1])


class PollLoop:
    """A thread that polls every ``seconds`` (None: on request alone) and on request.

    A signal handler may call ``reload``, since ``SimpleQueue.put`` is reentrant.
    """

    def __init__(self, poller: StorePoller, seconds: float | None) -> None:
        self._poller = poller
        self._seconds = seconds
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()  # set by the next look that begins
        self._thread = threading.Thread(target=self._run, name="recinfer-poll", daemon=True)

    def start(self) -> None:
        """Start the thread, which looks for the first time now."""
        self._thread.start()

    def reload(self) -> None:
        """Read the configuration and the store again."""
        self._requests.put("config")

    def look(self, stopped: threading.Event) -> None:
        """Request a look now, and wait until the look is done or ``stopped`` is set."""
        done = threading.Event()
        self._waiting.put(done)
        self.reload()
        while not (done.wait(_STOPPED_S) or stopped.is_set()):
            pass

    def stop(self, seconds: float = 0.0) -> None:
        """Stop polling, and wait up to ``seconds`` for the end of a running look; running changes finish."""
        self._requests.put(None)
        if seconds > 0 and self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        reason: str | None = "config" if self._seconds is None else "poll"
        while reason is not None:
            waiting = [self._waiting.get() for _ in range(self._waiting.qsize())]
            try:
                self._poller.poll(reason)
            except Exception:  # a bug of recinfer must not end polling
                _log.exception("model store: a look at %s failed", self._poller.folder)
            for done in waiting:
                done.set()
            try:
                reason = self._requests.get(timeout=self._seconds)
            except queue.Empty:
                reason = "poll"


def _weights_request(model: str, weights: Mapping[str, int]) -> pb.SetWeightsRequest:
    items = [pb.VersionWeight(version=version, weight=weight) for version, weight in weights.items()]
    return pb.SetWeightsRequest(model=model, weights=items)
