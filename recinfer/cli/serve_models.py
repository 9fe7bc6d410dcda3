"""Runs ``recinfer serve`` for whole models: as a single server, as a worker, or as a ranker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recinfer.cli.addresses import show_addresses
from recinfer.cli.console import Output
from recinfer.cli.remote import set_serving_when_reachable, shard_fan_out, unchecked, version_in
from recinfer.cli.serve_options import BatchOptions, LimitOptions, RoleOptions, ServeOptions, TableOptions
from recinfer.errors import ArchiveError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from recinfer.inference.predictor import Predictor
    from recinfer.serving.engine.registry import ModelRegistry, ServedModel
    from recinfer.serving.engine.scheduler import BatchConfig
    from recinfer.serving.engine.store import ModelStore, StoreManager
    from recinfer.serving.server.security import Security
    from recinfer.serving.server.server import Server
    from recinfer.serving.shards.fan_out import FanOut
    from recinfer.serving.wire.limits import Limits

__all__ = ["limits_of", "serve_models"]

_log = logging.getLogger(__name__)


def serve_models(options: ServeOptions, security: Security, output: Output) -> None:
    """Serve until a signal stops the server.

    Raises:
        ConfigError: nothing to serve, or deltas of several archives.
    """
    from recinfer.archive.mapping import name_files_at_sigbus
    from recinfer.serving.engine.registry import ModelRegistry
    from recinfer.serving.engine.store import StoreManager
    from recinfer.serving.server.run import serve
    from recinfer.serving.server.server import Server
    from recinfer.serving.workers.worker import WorkerLink

    name_files_at_sigbus()
    address = options.address
    link = WorkerLink() if options.worker else None
    state = None if link is None else link.restore
    fan_out = _fan_out(options.roles, options.limits, security)
    store = _store(options, fan_out)
    following = _StoreFollower(options)
    models = _models(options, fan_out, store, state, following)
    registry = ModelRegistry(models)
    if state is None:
        following.begin(registry)
    manager = None if store is None else StoreManager(registry, store, state)
    following.manager = manager
    server = Server(
        registry,
        address.host,
        address.port,
        limits=limits_of(options.limits),
        http_port=address.http_port,
        metrics_port=None if options.worker else address.metrics_port,  # the supervisor's
        batching=_batching(options.batching),
        security=security,
        share_port=options.worker,
        admin=manager if options.models.admin or following.wanted else None,
        admin_open=options.models.admin,
        admin_through=None if link is None else link.change,
        shards=fan_out,
        serving=fan_out is None,
    )
    if link is not None:
        link.attach(server, manager)
    life = _LifeCycle(options, models, fan_out, output, server, following)
    stop = None if link is None else link.gone
    serve(server, on_ready=life.ready, on_hangup=_on_hangup(fan_out, following), stop=stop)
    life.end()


def _on_hangup(fan_out: FanOut | None, following: _StoreFollower) -> Callable[[], None] | None:
    """The handler of SIGHUP; None if SIGHUP ends the process."""
    if fan_out is None and not following.wanted:
        return None

    def reload() -> None:
        if fan_out is not None:
            fan_out.pool.reload()
        following.reload()

    return reload


class _StoreFollower:
    """Follows the model store as ``--poll`` and ``--model-config`` say. A supervisor does this for all its workers.

    Raises:
        ConfigError: the file is bad, and nothing is served yet.
    """

    def __init__(self, options: ServeOptions) -> None:
        models = options.models
        self.wanted = models.model_store is not None and (models.poll is not None or models.model_config is not None)
        self.manager: StoreManager | None = None
        self.server: Server | None = None
        self._loop: PollLoop | None = None
        self._poller: StorePoller | None = None
        if self.wanted:
            from recinfer.serving.engine.poll import PollLoop, StorePoller

            assert models.model_store is not None
            try:
                self._poller = StorePoller(
                    models.model_store,
                    self._change,
                    self._state,
                    models.model_config,
                    is_ranker=options.roles.shards is not None,
                )
            except ConfigError:
                if not options.worker:  # a restarted worker serves the versions of the other workers
                    raise
            if self._poller is not None and not options.worker:
                self._loop = PollLoop(self._poller, models.poll)

    def choose(self, model: str, versions: list[str]) -> list[str]:
        """The subset of ``versions`` of a model that may be served first."""
        return versions if self._poller is None else self._poller.choice(model).of(versions)

    def begin(self, registry: ModelRegistry) -> None:
        """See StorePoller.begin."""
        if self._poller is not None:
            self._poller.begin(registry)

    def look(self, stopped: threading.Event) -> None:
        """Poll the store now, if polling is on, and wait for the end of the poll."""
        if self._loop is not None:
            self._loop.look(stopped)

    def start(self, server: Server) -> None:
        """Start to poll the store."""
        self.server = server
        if self._loop is not None:
            self._loop.start()

    def reload(self) -> None:
        """Poll the store now; safe to call from a signal handler."""
        if self._loop is not None:
            self._loop.reload()

    def stop(self) -> None:
        """Stop polling."""
        if self._loop is not None:
            self._loop.stop()

    def _change(self, call: str, data: bytes) -> bytes:
        from recinfer.serving.wire.loop import start_on_loop

        assert self.server is not None, "it looks once the server runs"
        calls = self.server.admin_calls

        async def made() -> bytes:
            return await calls[call](data)

        return start_on_loop(made()).result()

    def _state(self) -> dict[str, Any] | None:
        return None if self.manager is None else self.manager.state()


def _fan_out(roles: RoleOptions, limits: LimitOptions, security: Security) -> FanOut | None:
    if roles.shards is None:
        return None
    missing = None if roles.missing_shards is None else roles.missing_shards.name
    return shard_fan_out(roles.shards, security, missing, limits_of(limits).max_response_bytes)


def limits_of(options: LimitOptions) -> Limits:
    """The limits of the options, for a server."""
    from recinfer.serving.wire.limits import Limits

    return Limits(
        max_message_bytes=options.max_message_mib << 20,
        max_batch=options.max_samples,
        max_ids=options.max_ids,
        max_keys=options.max_features,
        max_response_bytes=options.max_response_mib << 20,
        max_concurrent=options.max_streams,
        memory_budget_bytes=options.memory_budget_mib << 20,
    )


def _batching(options: BatchOptions) -> BatchConfig:
    from recinfer.serving.engine.scheduler import BatchConfig

    return BatchConfig(max_batch=options.max_batch, max_queue=options.max_queue)


# --------------------------------------------------------------------------------------------------- what is served


def _loading(tables: TableOptions) -> dict[str, Any]:
    """Arguments of :func:`recinfer.load`, without ``lock``, which applies only to the archives on the command line."""
    return {
        "device": tables.device.value,
        "preload": tables.preload,
        "lookup_threads": tables.lookup_threads,
        "join_columns": tables.join_columns,
        "reuse_outputs": tables.reuse_outputs,
    }


def _store(options: ServeOptions, fan_out: FanOut | None) -> ModelStore | None:
    from recinfer.serving.engine.store import ModelStore
    from recinfer.serving.shards.lookups import MakeLookups

    folder = options.models.model_store
    if folder is None:
        return None
    lookups = None if fan_out is None else MakeLookups(fan_out, str(folder))
    return ModelStore(folder, lookups=lookups, **_loading(options.tables))


def _models(
    options: ServeOptions,
    fan_out: FanOut | None,
    store: ModelStore | None,
    state: dict[str, Any] | None,
    following: _StoreFollower,
) -> list[ServedModel]:
    """The archives on the command line, then those of the store; a restarted worker loads the versions that it served
    before."""
    from recinfer.serving.engine.store import restore

    models = _named(options, fan_out, restarted=state is not None)
    if state is not None:
        models = restore(state, models, store)
    elif store is not None and fan_out is not None:
        # A ranker serves the named archives, like a shard server; without any, it takes the versions of the store.
        models += [] if options.archives else _newest_of_shards(options, fan_out, store, following)
    elif store is not None:
        models += _newest(store, models, following)
    if not models:
        raise ConfigError("nothing to serve: give archive folders, or --model-store DIR with archives in it")
    return models


def _named(options: ServeOptions, fan_out: FanOut | None, *, restarted: bool) -> list[ServedModel]:
    """The archives on the command line; a restarted worker skips those that no longer exist."""
    from recinfer.inference.predictor import load
    from recinfer.serving.engine.registry import ServedModel

    tables, folder, deltas = options.tables, options.models.model_store, options.models.delta or []
    models = []
    if deltas and len(options.archives or []) != 1:
        raise ConfigError(
            f"--delta: got {len(options.archives or [])} archives; a delta applies to exactly one archive"
        )
    for archive in options.archives or []:
        version = ""
        try:
            if fan_out is not None:
                predictor = unchecked(archive, fan_out, folder, {"device": tables.device.value}, deltas)
                version = version_in(folder, archive)
            else:
                predictor = load(archive, lock=tables.lock, **_loading(tables))
        except (ArchiveError, NotFoundError) as error:
            if not restarted:
                raise
            _log.error("%s is not served by this process: %s", archive, error)
            continue
        models.append(ServedModel.of(predictor.manifest.model, predictor, version))
    if fan_out is None and models:
        for path in deltas:
            models[0].predictor.apply_delta(path)
    return models


def _newest(store: ModelStore, named: list[ServedModel], following: _StoreFollower) -> list[ServedModel]:
    """The newest version of each model in the store, except versions that are ``named`` on the command line; all versions that the
    configuration chooses, where the store is followed: nothing is ready before it has what callers may ask for."""
    from recinfer.serving.engine.registry import ServedModel

    here = {(model.name, model.version) for model in named}

    def opened(name: str, version: str) -> ServedModel | None:
        return None if (name, version) in here else ServedModel.of(name, store.open(name, version), version)

    found = store.newest_of_all(opened, needed=not named, every=following.wanted, choose=following.choose)
    return [model for model in found if model is not None]


def _newest_of_shards(
    options: ServeOptions, fan_out: FanOut, store: ModelStore, following: _StoreFollower
) -> list[ServedModel]:
    from recinfer.serving.engine.registry import ServedModel

    device = {"device": options.tables.device.value}

    def opened(name: str, version: str) -> ServedModel:
        predictor = unchecked(store.folder / name / version, fan_out, options.models.model_store, device)
        return ServedModel.of(name, predictor, version)

    return store.newest_of_all(opened, ArchiveError, choose=following.choose)


# --------------------------------------------------------------------------------------------------- from start to stop


def _engine_of(model: ServedModel) -> str:
    """A line that names the engine of a model's dense part."""
    from recinfer.archive.manifest import engine_text

    predictor = model.predictor
    if predictor.engine is None:
        return f"{model.name} {model.version} has no dense part: it serves lookups only"
    reason = predictor.engine_reason
    return f"the dense part of {model.name} {model.version} runs on {engine_text(predictor.engine, reason)}"


class _LifeCycle:
    """Reports the start, readiness and stop of the server to the user and to the supervisor."""

    def __init__(
        self,
        options: ServeOptions,
        models: list[ServedModel],
        fan_out: FanOut | None,
        output: Output,
        server: Server,
        following: _StoreFollower,
    ) -> None:
        self._options = options
        self._models = list(models)
        self._fan_out = fan_out
        self._output = output
        self._server = server
        self._following = following
        self._stopped = threading.Event()

    def ready(self) -> None:
        address, output, port = self._options.address, self._output, self._server.port
        if self._fan_out is not None:
            predictors: list[Predictor] = [model.predictor for model in self._models]
            set_serving_when_reachable(
                predictors, self._fan_out, output, self._server.set_serving, self._stopped, self._following.look
            )
        served = [f"{m.name} {m.version}" for m in self._models]
        engines = [_engine_of(m) for m in self._models]
        http_port, shown = self._server.http_port, self._server.metrics_port
        if not self._options.worker:  # otherwise the supervisor prints it once for all workers
            tls = self._options.security.tls_cert is not None
            ports = {"http_port": http_port, "metrics_port": shown}
            show_addresses(output, ", ".join(served), address.host, port, **ports, tls=tls, engines=engines)
        output.finish(
            {
                "model": self._models[0].name,
                "version": self._models[0].version,
                "serving": served,
                "engines": engines,
                "host": address.host,
                "port": port,
                "http_port": http_port,
                "metrics_port": shown,
            }
        )
        self._following.start(self._server)

    def end(self) -> None:
        self._stopped.set()
        self._following.stop()
        if self._fan_out is not None:
            self._fan_out.pool.close()
        if not self._options.worker:
            self._output.note("stopped")
