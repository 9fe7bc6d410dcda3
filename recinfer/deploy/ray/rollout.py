"""Rolls out another version to all rankers: all load it, or none does, before any of them switches."""

from __future__ import annotations

import time
from dataclasses import replace

from recinfer.deploy.ray.records import Records, Server
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import ConfigError, InputError, UnavailableError

__all__ = ["roll"]

_SWITCH_S, _LOOK_S = 60.0, 0.1


def roll(records: Records, spec: Deployment, version: str | None) -> str:
    """Switch to another version of the store (None: the previous one) and return the served version. Rankers read the
    deployment's record, load its candidate through their shard servers, and write into their own records that they have
    it, or why not.

    Raises:
        ConfigError: there is no store, or no previous version.
        InputError: a ranker refused the version; the served version is unchanged.
        UnavailableError: no ranker serves, or another rollout took over.
    """
    if spec.store is None:
        raise ConfigError(
            f"versions: {spec.archive} is not in a model store; deploy an archive at STORE/{spec.servers.model}/VERSION"
        )
    wanted = version or spec.previous
    if wanted is None:
        raise ConfigError(f"rollback: {spec.name} has served only version {spec.version}; there is no previous version")
    if wanted == spec.version:
        return wanted
    records.save(replace(spec, candidate=wanted))
    try:
        while not _is_loaded(records, spec.name, wanted):  # a ranker refuses a version that takes too long
            time.sleep(_LOOK_S)
        now = records.deployment(spec.name) or spec
        records.save(replace(now, version=wanted, previous=now.version, candidate=None))
    except BaseException:  # also Ctrl-C: rankers unload the candidate
        now = records.deployment(spec.name) or spec
        if now.candidate == wanted:
            records.save(replace(now, candidate=None))
        raise
    end = time.monotonic() + _SWITCH_S
    while time.monotonic() < end and any(each.version != wanted for each in _serving(records, spec.name)):
        time.sleep(_LOOK_S)
    return wanted


def _is_loaded(records: Records, name: str, version: str) -> bool:
    """Whether all serving rankers have loaded the version. A ranker that ends meanwhile is left out: its successor loads the
    version after its start."""
    now, rankers = records.deployment(name), _serving(records, name)
    if now is None or now.candidate != version:
        raise UnavailableError(f"version {version!r}: another rollout or --down took over; look at --status")
    if not rankers:
        raise UnavailableError(f"no ranker is serving, so none can load version {version!r}; nothing changed")
    for ranker in rankers:
        if version in ranker.refused:
            raise InputError(f"{ranker.name} on {ranker.host}: {ranker.refused[version]}")
    return all(version in ranker.loaded for ranker in rankers)


def _serving(records: Records, name: str) -> list[Server]:
    return [server for server in records.servers(name) if server.group is None and server.serving]
