"""Another version on all rankers: loaded by all of them, or by none, before one of them switches."""

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
    """The version that a deployment serves, and how it becomes another one. Thread-safe.

    Args:
        spec: of the deployment; its version is the first.
        rankers: gives the addresses of those that serve.
        committed: called when another version has become the one that servers start with, before rankers switch.

    Attributes:
        current: the version that is served.
        previous: the one before it; None: there was none.
    """

    def __init__(self, spec: Deployment, rankers: Callable[[], list[str]], committed: Callable[[], None]) -> None:
        self._spec, self._rankers, self._committed = spec, rankers, committed
        self.current = spec.version
        self.previous: str | None = None
        self._rolling = threading.Lock()
        self._fixing: set[str] = set()
        self._beside = ThreadPoolExecutor(4, thread_name_prefix="recinfer-versions")

    @property
    def rolling(self) -> bool:
        """Whether a roll-out is under way."""
        return self._rolling.locked()

    def roll(self, version: str | None) -> str:
        """Serve another version of the store, None being the one before; returns the version served now.

        Raises:
            ConfigError: there is no store, or nothing to go back to.
            UnavailableError: no ranker serves, or another roll-out is under way.
            RecinferError: the version was refused, and nothing has changed.
        """
        spec = self._spec
        if spec.store is None:
            raise ConfigError(
                f"versions: {spec.archive} is in no model store; deploy an archive that lies at STORE/{spec.model}/VERSION"
            )
        if version is None and self.previous is None:
            raise ConfigError(f"rollback: {spec.name} has served {self.current} alone; nothing to go back to")
        if not self._rolling.acquire(blocking=False):
            raise UnavailableError("versions: a roll-out is under way; wait for it")
        try:
            wanted = version or self.previous
            assert wanted is not None
            if wanted != self.current:
                self._roll(wanted)
            return self.current
        finally:
            self._rolling.release()

    def follow(self, address: str, process: str, version: str) -> None:
        """Look at one ranker: where it serves another version than the others, it is told beside. It started, or was away,
        while they changed.

        Args:
            address, version: of the ranker, and what it serves; empty: not known.
            process: names its process.
        """
        odd = self._spec.store is not None and version not in ("", self.current)
        if odd and process not in self._fixing and not self.rolling:
            self._fixing.add(process)
            self._beside.submit(self._fix, process, address, self.current)

    def close(self) -> None:
        """Begin nothing more."""
        self._beside.shutdown(wait=False, cancel_futures=True)

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
        self.previous, self.current = self.current, version  # who starts from now on starts with it
        self._committed()
        # What goes wrong from here on is seen to when the ranker is looked at next.
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
    """Phase one: every ranker has its shards map and check the version, and replays its golden requests.

    Args:
        rankers: their addresses.
        connect: address -> admin client.

    Returns:
        Those that have it. One that is gone meanwhile is not among them: it starts again with what is served then.

    Raises:
        RecinferError: a ranker or shard refused it; it is unloaded where it was loaded, and nothing has changed.
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
        raise UnavailableError(f"no ranker is there to load version {version!r}; nothing has changed")
    return done


def activate(address: str, model: str, version: str, connect: Connect) -> None:
    """Have a ranker answer from ``version``, which it loads if it must. Raises RecinferError."""
    with connect(address) as admin:
        here = _versions(admin, model)
        if version not in here:
            try:
                here = admin.load(model, version)[model]
            except InputError:  # somebody else was faster
                here = _versions(admin, model)
                if version not in here:
                    raise
        if [name for name, found in here.items() if found.weight] != [version]:
            admin.set_default(model, version)


def tidy(address: str, model: str, keep: Sequence[str | None], connect: Connect) -> None:
    """Unload all versions but those in ``keep`` and those that requests go to. Raises RecinferError."""
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
