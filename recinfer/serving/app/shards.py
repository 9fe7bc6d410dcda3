"""A shard server with the archives and the model store of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recinfer.errors import ConfigError
from recinfer.serving.app.follower import StoreFollower
from recinfer.serving.app.remote_archives import refresh_or_go_on, store_mirror
from recinfer.serving.app.service import Ready, ReadyRanks
from recinfer.serving.config import ServeConfig
from recinfer.serving.engine.store import UNSOUND, ModelStore
from recinfer.serving.server.security import Security
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.server.telemetry.metrics import Status
from recinfer.serving.shards.tables import ShardTables

__all__ = ["ShardService"]


class ShardService:
    """Serves the ranks of the configuration to rankers.

    Args:
        security: the settings of ``config.security``, read.

    Attributes:
        server: the server.

    Raises:
        ConfigError: nothing to serve, or deltas of several archives.
        ArchiveError: an archive or a delta breaks a rule of its format.
    """

    def __init__(self, config: ServeConfig, security: Security) -> None:
        assert config.role.ranks is not None
        self._config = config
        self._tables = _load(config)
        self.server = ShardServer(
            self._tables,
            config.address.host,
            config.address.port,
            metrics_port=config.address.metrics_port,
            security=security,
            limits=config.limits,
            socket_port=config.role.socket_port,
            idle_s=config.address.idle_seconds,
        )

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """See Service."""
        from recinfer.serving.server.run import serve

        serve(self.server, grace=self._config.address.drain_seconds, on_ready=lambda: on_ready(self._ready()))

    def start(self) -> ReadyRanks:
        """See Service."""
        self.server.start()
        return self._ready()

    async def status(self) -> Status:
        """See Service."""
        return self.server.status()

    def stop(self, grace: float) -> None:
        """See Service."""
        self.server.stop(grace)

    def _ready(self) -> ReadyRanks:
        tables = self._tables
        return ReadyRanks(
            ranks=tables.ranks,
            versions=tuple(tables.keys()),
            held=tuple(f"{model.manifest.model} {model.manifest.version}" for model in tables.models()),
            host=self._config.address.host,
            port=self.server.port,
            metrics_port=self.server.metrics_port,
        )


def _load(config: ServeConfig) -> ShardTables:
    """The ranks in the archives of the configuration; without archives, in one version of each model of the store."""
    assert config.role.ranks is not None
    archives, store, deltas = config.folders, config.models.store, config.models.deltas
    if not archives and store is None:
        raise ConfigError(
            "nothing to serve: give archive folders, or --model-store DIR with archives at DIR/MODEL/VERSION"
        )
    mirror = store_mirror(config)
    if mirror is not None:
        refresh_or_go_on(mirror)
    tables = ShardTables(
        config.role.ranks, store, mirror=mirror, preload=config.tables.preload, lock=config.tables.lock
    )

    def added(path: Path) -> Path:
        tables.add(path)
        return path

    if archives or store is None:
        paths = [added(path) for path in archives]
    else:
        paths = ModelStore(store).newest_of_all(
            tables.add_of_store, UNSOUND, choose=StoreFollower(config, is_worker=False).choose
        )
    if deltas and len(paths) != 1:
        raise ConfigError(f"--delta: got {len(paths)} archives; a delta applies to exactly one archive")
    if deltas:
        tables.add(paths[0], deltas)
    return tables
