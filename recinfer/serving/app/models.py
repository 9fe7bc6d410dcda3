"""A server of whole models with all that runs with it: a single server, a worker, or a ranker."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from recinfer.archive.manifest import engine_text
from recinfer.inference.predictor import Predictor
from recinfer.serving.app.follower import StoreFollower
from recinfer.serving.app.loading import load_models, open_store
from recinfer.serving.app.ranker import fan_out_of, serve_when_reachable
from recinfer.serving.app.service import Ready, ReadyModels, Report
from recinfer.serving.config import ServeConfig
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import StoreManager
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.server.telemetry.metrics import Status
from recinfer.serving.workers.worker import WorkerLink

__all__ = ["ModelService"]

_POLL_END_S = 5.0  # for a running poll at the end of a server in this process


class ModelService:
    """Serves whole models; follows the model store, and a ranker's shard servers, meanwhile.

    Args:
        security: the settings of ``config.security``, read.
        report: takes lines about the wait for shard servers.
        link: a worker's connection to its supervisor; None: this process is no worker.

    Attributes:
        server: the server.

    Raises:
        ConfigError: nothing to serve, deltas of several archives, or a bad file of ``model_config``.
        ArchiveError: an archive breaks a rule of its format, or answers a golden request wrongly.
    """

    def __init__(self, config: ServeConfig, security: Security, report: Report, link: WorkerLink | None = None) -> None:
        self._config = config
        self._report = report
        self._link = link
        self._stopped = threading.Event()
        self._fan_out = fan_out_of(config, security)
        try:
            self._follower = StoreFollower(config, is_worker=link is not None)
            self._load(security)
        except BaseException:
            self._close_fan_out()
            raise

    def _load(self, security: Security) -> None:
        config, link, follower = self._config, self._link, self._follower
        state = None if link is None else link.restore
        store = open_store(config, self._fan_out)
        self._models = load_models(config, self._fan_out, store, state, follower.choose)
        registry = self._registry = ModelRegistry(self._models)
        if state is None:
            follower.begin(registry)
        manager = None if store is None else StoreManager(registry, store, state)
        self.server = Server(
            registry,
            config.address.host,
            config.address.port,
            limits=config.limits,
            http_port=config.address.http_port,
            metrics_port=config.address.metrics_port if link is None else None,  # a worker has no metrics port
            batching=config.batching,
            security=security,
            share_port=link is not None,
            admin=manager if config.models.admin or config.models.follows_store else None,
            admin_open=config.models.admin,
            admin_through=None if link is None else link.change,
            shards=self._fan_out,
            serving=self._fan_out is None,
            unix_socket=config.address.unix_socket,
            cors_origins=config.address.cors_origins,
            drain_s=config.address.drain_seconds,
            idle_s=config.address.idle_seconds,
        )
        follower.attach(self.server, manager)
        if link is not None:
            link.attach(self.server, manager)

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """See Service; a worker ends with its supervisor too."""
        from recinfer.serving.server.run import serve

        stop = None if self._link is None else self._link.gone
        on_hangup = self._reload if self._config.reloads else None
        try:
            begin = functools.partial(self._begin, on_ready)
            serve(
                self.server,
                grace=self._config.address.drain_seconds,
                on_ready=begin,
                on_hangup=on_hangup,
                stop=stop,
            )
        finally:
            self._end()

    def start(self) -> ReadyModels:
        """See Service."""
        try:
            self.server.start()
            self._begin(lambda _: None)
            return self._ready()
        except BaseException:
            self.stop(0.0)
            raise

    async def status(self) -> Status:
        """See Service."""
        return self.server.status()

    def stop(self, grace: float) -> None:
        """See Service."""
        self._stopped.set()
        self._follower.stop(_POLL_END_S)
        try:
            self.server.stop(grace)
        finally:
            self._end()

    def _begin(self, on_ready: Callable[[Ready], None]) -> None:
        """Start the work next to the server, which takes requests."""
        on_ready(self._ready())  # first: a ranker's next lines say whether it has its shards
        if self._fan_out is not None:
            serve_when_reachable(
                self._predictors,
                self._fan_out,
                self._report,
                self.server.set_serving,
                self._stopped,
                self._follower.look,
            )
        self._follower.start()

    def _predictors(self) -> list[Predictor]:
        """The predictors of all versions that are served by now."""
        registry = self._registry
        return [model.predictor for name in registry.names() for model in registry.versions(name).values()]

    def _reload(self) -> None:
        """Read shards.json and the model store again; safe to call from a signal handler."""
        if self._fan_out is not None:
            self._fan_out.pool.reload()
        self._follower.reload()

    def _end(self) -> None:
        self._stopped.set()
        self._follower.stop()
        self._close_fan_out()

    def _close_fan_out(self) -> None:
        if self._fan_out is not None:
            self._fan_out.pool.close()
            self._fan_out = None

    def _ready(self) -> ReadyModels:
        server, models = self.server, self._models
        return ReadyModels(
            model=models[0].name,
            version=models[0].version,
            serving=tuple(f"{model.name} {model.version}" for model in models),
            engines=tuple(map(_engine_of, models)),
            host=self._config.address.host,
            port=server.port,
            http_port=server.http_port,
            metrics_port=server.metrics_port,
            unix_socket=None if self._config.address.unix_socket is None else str(self._config.address.unix_socket),
        )


def _engine_of(model: ServedModel) -> str:
    """A line that names the engine of a model's dense part."""
    predictor = model.predictor
    if predictor.engine is None:
        return f"{model.name} {model.version} has no dense part: it serves lookups only"
    reason = predictor.engine_reason
    return f"the dense part of {model.name} {model.version} runs on {engine_text(predictor.engine, reason)}"
