"""The archives and the model store that a configuration names by URL."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from recinfer.archive.manifest import shard_path
from recinfer.errors import UnavailableError
from recinfer.inference.progress import byte_bar
from recinfer.remote.cache import ArchiveCache, CachedArchive
from recinfer.remote.location import Location
from recinfer.remote.store import StoreMirror
from recinfer.serving.app.service import Report
from recinfer.serving.config import RoleConfig, ServeConfig

__all__ = ["refresh_or_go_on", "store_mirror", "with_local_archives"]

_log = logging.getLogger(__name__)


def with_local_archives(config: ServeConfig, report: Report) -> tuple[ServeConfig, list[CachedArchive]]:
    """The configuration with a folder in place of each archive's URL, downloaded with a progress bar on a terminal.

    Args:
        report: takes lines about downloads.

    Returns:
        The configuration, and the archives in the cache, to be kept while they are served.

    Raises:
        NotFoundError, ArchiveError, ConfigError, UnavailableError: see ArchiveCache.archive.
    """
    models = config.models
    cache = ArchiveCache(
        models.cache_dir, models.cache_bytes, progress=lambda what, total: byte_bar(what, total, True), report=report
    )
    held: list[CachedArchive] = []

    def local(path: str | Path) -> Path:
        if isinstance(path, Path):
            return path
        held.append(cache.archive(Location(path), wanted=_wanted(config.role)))
        return held[-1].path

    return replace(config, archives=tuple(map(local, config.archives))), held


def _wanted(role: RoleConfig) -> Callable[[str], bool]:
    """The files that a server of this role reads: a shard server its ranks' rows, a ranker all but rows."""
    if role.ranks is not None:
        shards = {"plan.json", *map(shard_path, role.ranks)}
        return lambda path: path in shards
    if role.shards is not None:
        return lambda path: not path.startswith("shards/")
    return lambda _: True


def store_mirror(config: ServeConfig) -> StoreMirror | None:
    """The mirror, for this role, of a store behind a URL; None for a store on disk; raises ConfigError for a bad URL."""
    models = config.models
    if models.store_url is None:
        return None
    return StoreMirror(
        models.store_url, ArchiveCache(models.cache_dir, models.cache_bytes, report=_log.info), _wanted(config.role)
    )


def refresh_or_go_on(mirror: StoreMirror) -> None:
    """Read the store; while its storage does not answer, go on with the versions that were seen last."""
    mirror.folder.mkdir(parents=True, exist_ok=True)
    try:
        mirror.refresh()
    except UnavailableError as error:
        if not any(mirror.folder.glob("*/*/manifest.json")):
            raise
        _log.warning("model store: the versions seen last are served: %s", error)
