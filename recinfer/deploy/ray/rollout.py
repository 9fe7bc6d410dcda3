"""Rolls out another version to all rankers: all load it, or none does, before any of them switches."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace

from recinfer.deploy.ray.records import Records, Saved, Server
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import ConfigError, InputError, RecinferError, UnavailableError
from recinfer.serving.client.admin import AdminClient, LoadedVersion

__all__ = ["Rollout", "follow", "roll", "version_to_roll"]

_CALL_S = 600.0  # loading reads and checks a whole archive
_SWITCH_S = 60.0
_log = logging.getLogger(__name__)


class Rollout:
    """The actor of a rollout: its name in the cluster keeps a second one away, and it can reach all rankers."""

    def roll(self, name: str, version: str | None) -> str:
        """See ``roll``."""
        return roll(Records(), name, version)


def roll(records: Records, name: str, version: str | None) -> str:
    """Switch to another version of the store (None: the previous one); returns the served version.

    Raises:
        ConfigError: there is no store, or no previous version.
        UnavailableError: no ranker serves.
        RecinferError: a server rejected the version; the served version is unchanged.
    """
    saved = records.saved(name)
    assert saved is not None
    wanted = version_to_roll(saved, version)
    if wanted == saved.version:
        return wanted
    _load_everywhere(records, saved, wanted)
    saved = records.saved(name) or saved
    records.save(replace(saved, version=wanted, previous=saved.version))  # servers that start from now on use it
    end = time.monotonic() + _SWITCH_S
    while time.monotonic() < end and any(server.version != wanted for server in _serving(records, name)):
        time.sleep(0.1)
    return wanted


def version_to_roll(saved: Saved, version: str | None) -> str:
    """The version to switch to. Raises ConfigError if there is no store, or no previous version."""
    spec = saved.spec
    if spec.store is None:
        raise ConfigError(
            f"versions: {spec.archive} is not in a model store; deploy an archive at STORE/{spec.model}/VERSION"
        )
    wanted = version or saved.previous
    if wanted is None:
        raise ConfigError(
            f"rollback: {spec.name} has served only version {saved.version}; there is no previous version"
        )
    return wanted


def follow(saved: Saved, ranker: Server) -> None:
    """Switch one ranker to the deployment's version, loading it if needed, and unload all but that and the previous one.
    A ranker that fails is switched at the next step."""
    model, wanted = saved.spec.model, saved.version
    if saved.spec.store is None or ranker.version in ("", wanted):
        return
    try:
        with connect(saved.spec, ranker.address) as admin:
            here = _versions(admin, model)
            if wanted not in here:
                with suppress(InputError):  # another client loaded it meanwhile
                    admin.load(model, wanted)
            admin.set_default(model, wanted)
            for version, found in _versions(admin, model).items():
                if version not in (wanted, saved.previous) and not found.weight:
                    admin.unload(model, version)
    except RecinferError as error:
        _log.warning("%s: versions of %s: %s", saved.spec.name, ranker.name, error)


def connect(spec: Deployment, address: str) -> AdminClient:
    """An admin client of a ranker."""
    tls = {} if spec.tls is None else spec.tls.settings()  # the keyword arguments have the same names
    return AdminClient(address, timeout=_CALL_S, **{"token": spec.token or "", **tls})


def _load_everywhere(records: Records, saved: Saved, version: str) -> None:
    """Have every ranker load the version through its shard servers and replay the golden requests. A ranker that is gone
    by then is left out: it restarts with the deployment's version. Raises RecinferError, with the version unloaded
    again."""
    spec, fresh, done = saved.spec, list[Server](), 0
    for ranker in _serving(records, spec.name):
        try:
            with connect(spec, ranker.address) as admin:
                if version not in _versions(admin, spec.model):
                    admin.load(spec.model, version)
                    fresh.append(ranker)
            done += 1
        except RecinferError as error:
            if isinstance(error, UnavailableError) and _is_gone(spec, ranker):
                continue
            for each in fresh:
                with suppress(RecinferError), connect(spec, each.address) as admin:
                    admin.unload(spec.model, version)
            raise
    if not done:
        raise UnavailableError(
            f"no ranker is serving, so none can load version {version!r}; the served version is unchanged"
        )


def _versions(admin: AdminClient, model: str) -> dict[str, LoadedVersion]:
    return admin.list_models().get(model, {})


def _is_gone(spec: Deployment, ranker: Server) -> bool:
    try:
        with connect(spec, ranker.address) as admin:
            admin.list_models()
    except UnavailableError:
        return True
    return False


def _serving(records: Records, name: str) -> list[Server]:
    return [server for server in records.servers(name) if server.group is None and server.serving]
