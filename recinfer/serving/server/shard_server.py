"""A shard server: answers rankers' lookups in its ranks, with health, metrics and a graceful stop as in the other servers."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from recinfer.errors import ArchiveError, InputError, OverloadedError
from recinfer.inference.stages import Stages
from recinfer.serving.engine.busy import BusyShare, thread_seconds
from recinfer.serving.engine.memory_budget import MemoryBudget
from recinfer.serving.engine.registry import RequestStats
from recinfer.serving.server.grpc_core import Admission, CoreServer, names_of
from recinfer.serving.server.grpc_methods import (
    add_standard_services,
    bind,
    connection_options,
    generic_handler,
)
from recinfer.serving.server.security import Security, follow_files
from recinfer.serving.server.telemetry.metrics import Status, request_figures
from recinfer.serving.server.telemetry.observe import Observer
from recinfer.serving.server.tuning import tell_open_files
from recinfer.serving.shards.messages import SERVICE_NAME, encode_failure, trace_headers
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.shards.transport import ShardListener
from recinfer.serving.wire import codec
from recinfer.serving.wire.address import check_address, join_address, plain_host
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.loop import STOP_SLACK_S, run_on_loop, run_start
from recinfer.serving.wire.proto import shards_pb2 as pb
from recinfer.serving.wire.status import status_of

if TYPE_CHECKING:
    from recinfer.serving.server.http_server import HttpServer

__all__ = ["ShardServer"]

# Requests up to this size are answered on the thread that reads: other requests would wait behind a larger request.
_SMALL_BYTES = 32 << 10
_MAX_RUNNING = 512  # long requests at a time; a further request of any size is refused
_NOTICED_S = 0.1  # for rankers to notice that this server takes no more requests
_SHOWN = ("", SERVICE_NAME)  # the services that health reports
_log = logging.getLogger(__name__)


class ShardServer:
    """Serves the ranks of ``tables``: lookups over the framed transport, control over gRPC from the serving loop.

    Args:
        tables: the ranks, in each version that is mapped.
        host, port, metrics_port, security, limits: the same as in recinfer.serving.server.server.Server.
        threads: number of threads for long requests; None: one per core, at most 4.
        socket_port: port for rankers' lookups (recinfer.serving.shards.transport); 0: a free port. Rankers learn the port over
            gRPC.
        idle_s: seconds after which a gRPC connection without a call is closed; None: never. A ranker always has a call.
    """

    def __init__(
        self,
        tables: ShardTables,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        metrics_port: int | None = None,
        security: Security | None = None,
        limits: Limits | None = None,
        threads: int | None = None,
        socket_port: int = 0,
        idle_s: float | None = None,
    ) -> None:
        for name, number in (("port", port), ("socket port", socket_port)):
            if not 0 <= number <= 65535:
                raise InputError(f"{name}: got {number}, expected 0 to 65535")
        self._security = security or Security()
        self._security.check_host(host)
        self.tables = tables
        self.host = plain_host(host)
        self.port = port
        self.socket_port = socket_port
        self._idle_s = idle_s
        self._limits = limits or Limits()
        self.metrics_port = metrics_port
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._running = self._refused = 0
        self._pool_seconds = 0.0
        self._counting = threading.Lock()
        self._busy: list[BusyShare] = []
        self.stats = RequestStats()
        self._stages = Stages("lookup")
        self.budget = MemoryBudget(self._limits.memory_budget_bytes)
        self._observer = Observer(self.stats)
        self._started = time.monotonic()
        self._server: CoreServer | None = None
        self._listener: ShardListener | None = None
        self._metrics: HttpServer | None = None

    @property
    def target(self) -> str:
        """The address to which a ranker connects."""
        return join_address(self.host, self.port)

    def start(self) -> ShardServer:
        """Bind and accept requests; raises UnavailableError, and leaves no port open, when an address cannot be bound."""
        run_start(self._start(), self.stop)
        return self

    def stop(self, grace: float = 10.0) -> None:
        """Notify the rankers, let running requests end for up to ``grace`` seconds, then close."""
        if self._server is not None:
            run_on_loop(self._stop(grace), timeout=grace + STOP_SLACK_S)

    def __enter__(self) -> ShardServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def status(self) -> Status:
        """This process's status (recinfer.serving.server.telemetry.metrics); ``held``: the mapped versions."""
        busy = max((share.now() for share in self._busy), default=0.0)
        return {
            "uptime": time.monotonic() - self._started,
            "workers": 1,
            "load": busy,
            "ready": self._server is not None and self._health.is_ready(),
            **request_figures(self.stats, self._stages.state(), self.budget),
            "security": self._security.figures(),
            "queue": None,
            "models": [],
            "shards": None,
            "held": {
                "ranks": list(self.tables.ranks),
                "busy": busy,
                "running": self._running,
                "refused": self._refused,
                "versions": [
                    {
                        "key": model.key,
                        "model": model.manifest.model,
                        "version": model.manifest.version,
                        "deltas": model.deltas,
                        "mapped": model.mapped_bytes,
                    }
                    for model in self.tables.models()
                ],
            },
        }

    async def _start(self) -> None:
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="recinfer-shard")
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="recinfer-prepare")
        admission = Admission(self._security, self._observer, names=names_of(*pb.DESCRIPTOR.services_by_name.values()))
        server = CoreServer(
            connection_options(self._limits, self._idle_s),
            admit=admission.admit,
            refused=admission.refused,
            budget=self.budget,
            most_bytes=self._limits.max_message_bytes,
        )
        calls = {"Prepare": self._prepare, "State": self._state}
        self._health = add_standard_services(server, [SERVICE_NAME], [pb.DESCRIPTOR])
        await self._health.show(_SHOWN, False)  # before the first connection
        server.add_generic_rpc_handlers((generic_handler(SERVICE_NAME, calls, self._observer),))
        check_address(self.host, self.port)
        self.port = bind(server, self._security, self.host, self.port)
        self._listener = ShardListener(
            self.host,
            self.socket_port,
            self._take,
            self._refuse,
            tokens=lambda: self._security.tokens,
            max_request_bytes=self._limits.max_message_bytes,
            tls=self._security.tls_context(),
            budget=self.budget,
        )
        self.socket_port = self._listener.port
        await server.start()
        self._server = server
        self._tasks = [asyncio.create_task(work) for work in (tell_open_files(), follow_files(self._security))]
        # The reading thread answers small requests, the pool long requests.
        reads = self._listener.thread.thread_id or 0
        self._busy = [
            BusyShare(lambda: thread_seconds(reads)),
            BusyShare(lambda: self._pool_seconds / self._threads),
        ]
        if self.metrics_port is not None:
            await self._start_metrics(self.metrics_port)
        await self._health.show(_SHOWN, True)

    async def _stop(self, grace: float) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for task in self._tasks:
            task.cancel()
        await self._health.end()
        # A ranker that is notified now may have sent a request before; gRPC's own grace would be for all calls, State's too.
        end = time.monotonic() + grace
        await asyncio.sleep(min(grace, _NOTICED_S))
        while self._running and time.monotonic() < end:
            await asyncio.sleep(_NOTICED_S)
        if self._listener is not None:
            closing = threading.Thread(target=self._listener.close)  # executors take no work at the end of the program
            closing.start()
            while closing.is_alive():
                await asyncio.sleep(_NOTICED_S)
        await server.stop(min(grace, _NOTICED_S))
        if self._metrics is not None:
            await self._metrics.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._preparing.shutdown(wait=False, cancel_futures=True)

    async def _start_metrics(self, port: int) -> None:
        from recinfer.serving.server.telemetry.metrics_http import start_metrics

        self._metrics = await start_metrics(self.status, self.host, port, self._security)
        self.metrics_port = self._metrics.port

    # -- lookups: on the listener's thread, or in the pool -----------------------------------------------------------

    def _take(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer a small request here and a long request in the pool, so that no request waits behind a long one."""
        if self._running >= _MAX_RUNNING:
            reply(self._refuse(data))
        elif len(data) <= _SMALL_BYTES:
            reply(self._counted(self._find, data))
        else:
            with self._counting:
                self._running += 1
            self._pool.submit(self._answer_in_pool, data, reply)

    def _answer_in_pool(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        start = time.perf_counter()
        try:
            reply(self._counted(self._find, data))
        finally:
            with self._counting:
                self._running -= 1
                self._pool_seconds += time.perf_counter() - start

    def _find(self, data: bytes) -> bytes:
        start = time.perf_counter()
        try:
            return self.tables.find(data, self._limits)
        finally:
            self._stages.add("lookup", time.perf_counter() - start)

    def _refuse(self, data: bytes) -> bytes:
        """The response to a request that arrives while too many are under way."""

        def refuse(_: bytes) -> bytes:
            raise OverloadedError(f"the shard has too many requests under way, {self._running} of them long ones")

        self._refused += 1
        return self._counted(refuse, data)

    def _counted(self, answer: Callable[[bytes], bytes], data: bytes) -> bytes:
        """The response of ``answer``, or the response that reports its error; counted in this server's figures."""
        start = time.perf_counter()
        try:
            found, code = answer(data), "OK"
        except Exception as error:
            status = status_of(error)
            if status.code == "INTERNAL":
                _log.exception("a lookup of %d bytes failed", len(data))
            found, code = encode_failure(status.code, status.message), status.code
        headers = functools.partial(trace_headers, data)
        self._observer.answered("Find", code, time.perf_counter() - start, headers=headers, num_bytes=len(data))
        return found

    # -- gRPC's calls ------------------------------------------------------------------------------------------------

    async def _prepare(self, data: bytes) -> bytes:
        request = codec.parse(pb.PrepareRequest, data)
        self.tables.keep(request.wanted)

        def prepare() -> None:
            try:
                self.tables.prepare(request.version, request.folder, list(request.deltas))
            except ArchiveError as error:
                raise InputError(f"version: {request.folder!r} of this host's store is not sound: {error}") from None

        await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)
        return self._shard_state()

    async def _state(self, data: bytes) -> bytes:
        self.tables.keep(codec.parse(pb.StateRequest, data).wanted)
        return self._shard_state()

    def _shard_state(self) -> bytes:
        state = pb.ShardState(ranks=self.tables.ranks, versions=self.tables.keys())
        if self._listener is not None:
            state.socket_port, state.socket_server = self._listener.port, self._listener.server_id
            state.socket_bytes = self._listener.max_request_bytes
        return state.SerializeToString()
