"""Rolls out another version to all rankers: all load it, or none does, before any of them switches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import ConfigError, InputError, RecinferError, UnavailableError
from recinfer.serving.client.admin import AdminClient, LoadedVersion

__all__ = ["Versions", "activate", "load_everywhere", "tidy"]

Connect = Callable[[str], AdminClient]

_CALL_S = 600.0  # loading reads and checks a whole archive
_log = logging.getLogger(__name__)


class Versions:
    """The version that a deployment serves, and the rollout of another one. Thread-safe.

    Args:
        spec: the deployment; its version is the first served.
        rankers: returns the addresses of the serving rankers.
        committed: called when servers start with the new version from now on, before rankers switch.

    Attributes:
        current: the version that is served.
        previous: the version before it; None if there was none.
    """

    def __init__(self, spec: Deployment, rankers: Callable[[], list[str]], committed: Callable[[], None]) -> None:
        self._spec, self._rankers, self._committed = spec, rankers, committed
        self.current = spec.version
        self.previous: str | None = None
        self._rolling = threading.Lock()
        self._fixing: set[str] = set()
        self._background = ThreadPoolExecutor(4, thread_name_prefix="recinfer-versions")

    @property
    def rolling(self) -> bool:
        """Whether a rollout is in progress."""
        return self._rolling.locked()

    def roll(self, version: str | None) -> str:
        """Switch to another version of the store (None: the previous one); returns the served version.

        Raises:
            ConfigError: there is no store, or no previous version.
            UnavailableError: no ranker serves, or another rollout is in progress.
            RecinferError: a server rejected the version; the served version is unchanged.
        """
        spec = self._spec
        if spec.store is None:
            raise ConfigError(
                f"versions: {spec.archive} is not in a model store; deploy an archive at STORE/{spec.model}/VERSION"
            )
        if version is None and self.previous is None:
            raise ConfigError(
                f"rollback: {spec.name} has served only version {self.current}; there is no previous version"
            )
        if not self._rolling.acquire(blocking=False):
            raise UnavailableError("versions: another rollout is in progress; try again when it has finished")
        try:
            wanted = version or self.previous
            assert wanted is not None
            if wanted != self.current:
                self._roll(wanted)
            return self.current
        finally:
            self._rolling.release()

    def follow(self, address: str, process: str, version: str) -> None:
        """Switch one ranker to the current version, in the background, if it serves another one because it started or
        was unreachable during a rollout.

        Args:
            address: of the ranker. version: the version that it serves; empty if unknown.
            process: name of its process.
        """
        odd = self._spec.store is not None and version not in ("", self.current)
        if odd and process not in self._fixing and not self.rolling:
            self._fixing.add(process)
            self._background.submit(self._fix, process, address, self.current)

    def close(self) -> None:
        """Cancel work that has not started."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _connect(self, address: str) -> AdminClient:
        tls = self._spec.tls
        if tls is None:
            return AdminClient(address, token=self._spec.token or "", timeout=_CALL_S)
        return AdminClient(
            address, token=self._spec.token or "", timeout=_CALL_S, tls_name=tls.name or "", **tls.caller()
        )

    def _roll(self, version: str) -> None:
        model = self._spec.model
        load_everywhere(self._rankers(), model, version, self._connect)
        self.previous, self.current = self.current, version  # servers that start from now on use it
        self._committed()
        # A ranker that fails from here on is switched by `follow` at the next step.
        for address in self._rankers():
            self._try(address, lambda at: activate(at, model, version, self._connect))
        for address in self._rankers():
            self._try(address, lambda at: tidy(at, model, (version, self.previous), self._connect))

    def _fix(self, process: str, address: str, version: str) -> None:
        try:
            self._try(address, lambda at: activate(at, self._spec.model, version, self._connect))
        finally:
            self._fixing.discard(process)

    def _try(self, address: str, change: Callable[[str], None]) -> None:
        try:
            change(address)
        except RecinferError as error:
            _log.warning("deployment %s: versions of %s: %s", self._spec.name, address, error)


def load_everywhere(rankers: Sequence[str], model: str, version: str, connect: Connect) -> list[str]:
    """Phase one: have every ranker load the version through its shard servers and replay the golden requests.

    Args:
        rankers: their addresses.
        connect: address -> admin client.

    Returns:
        The rankers that loaded it. A ranker that fails meanwhile is left out: it restarts with the served version.

    Raises:
        RecinferError: a ranker or shard server rejected it; it is unloaded again everywhere.
    """
    fresh: list[str] = []
    done: list[str] = []
    for address in rankers:
        try:
            with connect(address) as admin:
                if version not in _versions(admin, model):
                    admin.load(model, version)
                    fresh.append(address)
            done.append(address)
        except RecinferError as error:
            if isinstance(error, UnavailableError) and _is_gone(address, connect):
                continue
            for each in fresh:
                with suppress(RecinferError), connect(each) as admin:
                    admin.unload(model, version)
            raise
    if not done:
        raise UnavailableError(
            f"no ranker is serving, so none can load version {version!r}; the served version is unchanged"
        )
    return done


def activate(address: str, model: str, version: str, connect: Connect) -> None:
    """Make ``version`` the default of a ranker, loading it if needed. Raises RecinferError."""
    with connect(address) as admin:
        here = _versions(admin, model)
        if version not in here:
            try:
                here = admin.load(model, version)[model]
            except InputError:  # another client loaded it meanwhile
                here = _versions(admin, model)
                if version not in here:
                    raise
        if [name for name, found in here.items() if found.weight] != [version]:
            admin.set_default(model, version)


def tidy(address: str, model: str, keep: Sequence[str | None], connect: Connect) -> None:
    """Unload all versions except those in ``keep`` and those that receive requests. Raises RecinferError."""
    with connect(address) as admin:
        for version, found in _versions(admin, model).items():
            if version not in keep and not found.weight:
                admin.unload(model, version)


def _versions(admin: AdminClient, model: str) -> dict[str, LoadedVersion]:
    return admin.list_models().get(model, {})


def _is_gone(address: str, connect: Connect) -> bool:
    try:
        with connect(address) as admin:
            admin.list_models()
    except UnavailableError:
        return True
    return False
