"""Several workers on one port below a supervisor, which follows the model store and shows the metrics for all of them."""

from __future__ import annotations

import asyncio
import base64
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from recinfer import env
from recinfer.serving.app.remote_archives import store_mirror
from recinfer.serving.app.service import Ready, ReadyModels, Report
from recinfer.serving.config import ServeConfig
from recinfer.serving.engine.poll import PollLoop, StorePoller
from recinfer.serving.server.http_server import HttpServer
from recinfer.serving.server.security import Security, follow_files
from recinfer.serving.server.telemetry.metrics import Status
from recinfer.serving.server.telemetry.metrics_http import metrics_server
from recinfer.serving.wire.address import hold_address
from recinfer.serving.wire.loop import STOP_SLACK_S, run_on_loop, start_on_loop
from recinfer.serving.workers.supervisor import Supervisor
from recinfer.strict_json import build

__all__ = ["WorkersService", "worker_command"]


def worker_command(config: ServeConfig, *, debug: bool = False) -> list[str]:
    """The command of a worker with the settings ``config``, whose ports the supervisor holds."""
    program = [sys.executable, "-m", "recinfer", *(["--debug"] if debug else []), "serve", "--worker", "--json"]
    log = ["--log-json"] if config.address.log_json else []  # for errors that come before the worker reads its settings
    return [*program, *log, "--worker-config", config.to_json()]


class WorkersService:
    """Runs the workers of one port.

    The metrics port is this process's own: it shows the sum of the workers' counts. The other ports are held here and
    shared by the workers only: a second server on one of them fails, instead of sharing it without an error message.

    Args:
        security: the settings of ``config.security``, read.
        report: takes a line for each worker that died or came back.
        debug: the workers show tracebacks of expected errors.

    Raises:
        UnavailableError: a port cannot be bound.
        ConfigError: this process is a worker, or the file of ``model_config`` is bad.
    """

    def __init__(self, config: ServeConfig, security: Security, report: Report, *, debug: bool = False) -> None:
        self._config = config
        address, models = config.address, config.models
        self._loop = self._poll_loop()
        self._security = security
        self._follows: Future[None] | None = None
        self._metrics: HttpServer | None = None
        if address.metrics_port is not None:
            self._metrics = metrics_server(self.status, address.host, address.metrics_port, security)
        self._http = None if address.http_port is None else hold_address(address.host, address.http_port)
        bound_http = None if self._http is None else int(self._http.getsockname()[1])

        def command(bound: int) -> list[str]:
            return worker_command(config.of_worker(bound, bound_http), debug=debug)

        try:
            self._supervisor = Supervisor(
                command,
                models.workers,
                address.host,
                address.port,
                grace=address.drain_seconds,
                timeout=models.worker_timeout,
                report=report,
                one_first=models.model_store is not None,
                environment=env.child_environment(RECINFER_TOKEN=security.tokens[0]) if security.tokens else None,
            )
        except BaseException:
            if self._http is not None:
                self._http.close()
            raise

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """See Service."""
        if self._config.reloads:
            signal.signal(signal.SIGHUP, lambda *_: self._reload())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._supervisor.stop())
        self._serve(on_ready)

    def start(self) -> ReadyModels:
        """See Service; raises UnavailableError if a worker ends before it was ever ready."""
        found: queue.SimpleQueue[Ready | BaseException] = queue.SimpleQueue()

        def serve() -> None:
            try:
                self._serve(found.put)
            except BaseException as error:
                found.put(error)

        self._thread = threading.Thread(target=serve, name="recinfer-supervisor", daemon=True)
        self._thread.start()
        try:
            first = found.get()
            if isinstance(first, BaseException):
                raise first
        except BaseException:
            self.stop(0.0)
            raise
        assert isinstance(first, ReadyModels)
        return first

    async def status(self) -> Status:
        """See Service; waits for the workers in a thread."""
        return await asyncio.to_thread(self._supervisor.status)

    def stop(self, grace: float) -> None:
        """See Service. The workers have the supervisor's grace period."""
        self._supervisor.stop()
        self._thread.join()

    def _serve(self, on_ready: Callable[[Ready], None]) -> None:
        def ready(answer: dict[str, Any]) -> None:
            metrics_port = None
            if self._metrics is not None:
                run_on_loop(self._metrics.start())
                self._follows = start_on_loop(follow_files(self._security))
                metrics_port = self._metrics.port
            on_ready(replace(build(ReadyModels, answer, "a worker's first line"), metrics_port=metrics_port))
            if self._loop is not None:
                self._loop.start()

        try:
            self._supervisor.run(ready)
        finally:
            self._close()

    def _close(self) -> None:
        """Close all but the supervisor, which closes with the end of its run."""
        if self._follows is not None:
            self._follows.cancel()
        if self._metrics is not None:
            run_on_loop(self._metrics.stop(), timeout=STOP_SLACK_S)
        if self._loop is not None:
            self._loop.stop()
        if self._http is not None:
            self._http.close()

    def _reload(self) -> None:
        """Read the model store again, and have rankers read shards.json again; safe to call from a signal handler."""
        if self._loop is not None:
            self._loop.reload()
        if self._config.role.shards is not None:
            self._supervisor.hang_up()

    def _poll_loop(self) -> PollLoop | None:
        models = self._config.models
        if models.store is None or not models.follows_store:
            return None

        def change(call: str, data: bytes) -> str:
            return self._supervisor.changes.submit(call, base64.b64encode(data).decode()).result()

        is_ranker = self._config.role.shards is not None
        poller = StorePoller(
            models.store,
            change,
            lambda: self._supervisor.changes.state,
            models.model_config,
            is_ranker=is_ranker,
            mirror=store_mirror(self._config),
        )
        return PollLoop(poller, models.poll)
