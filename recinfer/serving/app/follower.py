"""Follows the model store of a server, as its ``poll`` and ``model_config`` say."""

from __future__ import annotations

import threading

from recinfer.errors import ConfigError
from recinfer.serving.app.remote_archives import store_mirror
from recinfer.serving.config import ServeConfig
from recinfer.serving.engine.poll import PollLoop, StorePoller
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.engine.state import ServedState
from recinfer.serving.engine.store import StoreManager
from recinfer.serving.server.server import Server
from recinfer.serving.wire.loop import start_on_loop

__all__ = ["StoreFollower"]


class StoreFollower:
    """Chooses the versions of the store that a process serves, and polls the store; a supervisor polls for its workers.

    A process without a followed store chooses all versions, and polls nothing.

    Args:
        is_worker: whether this process is a worker.

    Raises:
        ConfigError: the file of ``model_config`` is bad, and nothing is served yet.
    """

    def __init__(self, config: ServeConfig, *, is_worker: bool) -> None:
        models = config.models
        self._server: Server | None = None
        self._manager: StoreManager | None = None
        self._loop: PollLoop | None = None
        self._poller: StorePoller | None = None
        if not models.follows_store:
            return
        assert models.store is not None
        is_ranker = config.role.shards is not None
        try:
            self._poller = StorePoller(
                models.store,
                self._change,
                self._state,
                models.model_config,
                is_ranker=is_ranker,
                mirror=None if is_worker else store_mirror(config),
            )
        except ConfigError:
            if not is_worker:  # a restarted worker serves the versions of the other workers
                raise
        self._takes_one = is_ranker or config.role.ranks is not None
        if self._poller is not None and not is_worker:
            self._loop = PollLoop(self._poller, models.poll)

    def choose(self, model: str, versions: list[str]) -> list[str]:
        """The subset of ``versions`` of a model that may be served first.

        A ranker and a shard server begin with the first of them that is sound: one that requests go to, if there are any, as
        rankers have not tried the others.
        """
        if self._poller is None:
            return versions
        choice = self._poller.choice(model)
        found = choice.of(versions)
        return sorted(found, key=lambda version: not choice.weights.get(version)) if self._takes_one else found

    def begin(self, registry: ModelRegistry) -> None:
        """Set labels and weights before models are served, see StorePoller.begin."""
        if self._poller is not None:
            self._poller.begin(registry)

    def attach(self, server: Server, manager: StoreManager | None) -> None:
        """Make changes through ``server`` from now on."""
        self._server, self._manager = server, manager

    def start(self) -> None:
        """Start to poll the store; the server has started."""
        if self._loop is not None:
            self._loop.start()

    def look(self, stopped: threading.Event) -> None:
        """Poll the store now, if polling is on, and wait for the end of the poll, or until ``stopped`` is set."""
        if self._loop is not None:
            self._loop.look(stopped)

    def reload(self) -> None:
        """Poll the store now; safe to call from a signal handler."""
        if self._loop is not None:
            self._loop.reload()

    def stop(self, seconds: float = 0.0) -> None:
        """Stop polling, and wait up to ``seconds`` for the end of a running poll."""
        if self._loop is not None:
            self._loop.stop(seconds)

    def _change(self, call: str, data: bytes) -> bytes:
        assert self._server is not None, "the poll loop starts after the server"
        calls = self._server.admin_calls

        async def made() -> bytes:
            return await calls[call](data)

        return start_on_loop(made()).result()

    def _state(self) -> ServedState | None:
        return None if self._manager is None else self._manager.state()
