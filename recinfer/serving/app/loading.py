"""Loads the models of a server: the archives of its configuration, then those of its model store."""

from __future__ import annotations

import logging
from collections.abc import Callable

from recinfer.errors import ArchiveError, ConfigError, NotFoundError
from recinfer.inference.predictor import load
from recinfer.serving.app.ranker import lookups_of_store, ranker_predictor, version_in
from recinfer.serving.app.remote_archives import refresh_or_go_on, store_mirror
from recinfer.serving.config import ServeConfig
from recinfer.serving.engine.registry import ServedModel
from recinfer.serving.engine.state import ServedState
from recinfer.serving.engine.store import UNSOUND, ModelStore, restore
from recinfer.serving.shards.fan_out import FanOut

__all__ = ["load_models", "open_store"]

_log = logging.getLogger(__name__)

Choose = Callable[[str, list[str]], list[str]]


def open_store(config: ServeConfig, fan_out: FanOut | None) -> ModelStore | None:
    """The model store of the configuration; its versions look rows up over ``fan_out`` if there is one."""
    folder = config.models.store
    if folder is None:
        return None
    mirror = store_mirror(config)
    if mirror is not None:
        refresh_or_go_on(mirror)
    lookups = None if fan_out is None else lookups_of_store(fan_out, folder, mirror)
    return ModelStore(folder, mirror, lookups=lookups, **config.tables.load_options())


def load_models(
    config: ServeConfig,
    fan_out: FanOut | None,
    store: ModelStore | None,
    state: ServedState | None,
    choose: Choose,
) -> list[ServedModel]:
    """The archives of the configuration, then those of the store.

    Args:
        fan_out: of a ranker.
        state: the models that a restarted worker loads again; None: all that the configuration names.
        choose: (model, versions) -> the versions of the store that may be served.

    Raises:
        ConfigError: nothing to serve, or deltas of several archives.
        ArchiveError: an archive breaks a rule of its format, or answers a golden request wrongly.
        UnavailableError: a restarted worker lacks the default model of the others.
    """
    models = _named(config, fan_out, store, is_restarted=state is not None)
    if state is not None:
        models = restore(state, models, store)
    elif store is not None and fan_out is not None:
        # A ranker serves the named archives, like a shard server; without any, it takes the versions of the store.
        models += [] if config.archives else _newest_of_ranker(fan_out, store, choose)
    elif store is not None:
        models += _newest(store, models, choose, every=config.models.follows_store)
    if not models:
        place = config.models.store
        raise ConfigError(
            "nothing to serve: give archive folders, or --model-store DIR with archives at DIR/MODEL/VERSION"
            if place is None
            else f"nothing to serve: model store {place} has no archive that may be served at {place}/MODEL/VERSION"
        )
    return models


def _named(
    config: ServeConfig, fan_out: FanOut | None, store: ModelStore | None, *, is_restarted: bool
) -> list[ServedModel]:
    """The archives of the configuration; a restarted worker skips those that no longer exist."""
    tables, deltas = config.tables, config.models.deltas
    models = []
    if deltas and len(config.archives) != 1:
        raise ConfigError(f"--delta: got {len(config.archives)} archives; a delta applies to exactly one archive")
    for archive in config.folders:
        version = ""
        try:
            if fan_out is not None:
                predictor = ranker_predictor(archive, fan_out, store, deltas)
                version = version_in(store, archive)
            else:
                predictor = load(archive, lock=tables.lock, **tables.load_options())
        except (ArchiveError, NotFoundError) as error:
            if not is_restarted:
                raise
            _log.error("%s is not served by this process: %s", archive, error)
            continue
        models.append(ServedModel.of(predictor.manifest.model, predictor, version))
    if fan_out is None and models:
        for path in deltas:
            models[0].predictor.apply_delta(path)
    return models


def _newest(store: ModelStore, named: list[ServedModel], choose: Choose, *, every: bool) -> list[ServedModel]:
    """The newest version of each model in the store, except versions that are ``named`` by the configuration.

    Args:
        every: all versions that ``choose`` returns: a server that follows its store is not ready before it has all
            versions that callers may request.
    """
    here = {(model.name, model.version) for model in named}

    def opened(name: str, version: str) -> ServedModel | None:
        return None if (name, version) in here else ServedModel.of(name, store.open(name, version), version)

    found = store.newest_of_all(opened, needed=not named, every=every, choose=choose)
    return [model for model in found if model is not None]


def _newest_of_ranker(fan_out: FanOut, store: ModelStore, choose: Choose) -> list[ServedModel]:
    def opened(name: str, version: str) -> ServedModel:
        predictor = store.opened(name, version, lambda path: ranker_predictor(path, fan_out, store))
        return ServedModel.of(name, predictor, version)

    return store.newest_of_all(opened, UNSOUND, choose=choose)
