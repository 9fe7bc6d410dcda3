"""The server: gRPC with health and reflection, HTTP, admin and metrics, and a stop that lets running requests end."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pkgutil
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2

from recinfer.errors import ConfigError, InputError
from recinfer.serving.engine.busy import Load
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.dispatcher import Dispatcher, LoopCaller
from recinfer.serving.engine.memory_budget import MemoryBudget, ticket_of_task
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.remote_byte_path import MOST_FAN_OUTS
from recinfer.serving.engine.request import CallName
from recinfer.serving.engine.scheduler import Scheduler
from recinfer.serving.engine.store import ModelStore, StoreManager
from recinfer.serving.server.grpc_call import Dispatch, dispatched
from recinfer.serving.server.grpc_core import Admission, CoreServer, names_of
from recinfer.serving.server.grpc_methods import (
    Answer,
    add_standard_services,
    bind,
    connection_options,
    deadline,
    generic_handler,
    signed,
)
from recinfer.serving.server.health import EndingHealth
from recinfer.serving.server.http_protocols import HTTP_PROTOCOLS
from recinfer.serving.server.open_inference_grpc import SERVICE_NAME as OPEN_INFERENCE
from recinfer.serving.server.open_inference_grpc import OpenInference
from recinfer.serving.server.security import Security, follow_files
from recinfer.serving.server.telemetry.metrics import ServerMetrics
from recinfer.serving.server.telemetry.observe import Observer
from recinfer.serving.server.tuning import tell_open_files
from recinfer.serving.wire.address import check_address, join_address, plain_host
from recinfer.serving.wire.admin_verbs import VERBS
from recinfer.serving.wire.limits import BatchConfig, Limits
from recinfer.serving.wire.loop import STOP_SLACK_S, run_on_loop, run_start
from recinfer.serving.wire.proto import admin_pb2, open_inference_pb2
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.unix_socket import SocketFile

if TYPE_CHECKING:
    from recinfer.inference.archived import ArchivedModel
    from recinfer.inference.predictor import Predictor
    from recinfer.serving.server.http_server import HttpServer
    from recinfer.serving.shards.fan_out import FanOut

__all__ = ["SERVICE_NAME", "Server"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_ADMIN_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_FILES = (pb.DESCRIPTOR, admin_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR)
_log = logging.getLogger(__name__)


class Server:
    """Serves predictors over gRPC from a background thread.

    Args:
        predictors: name -> predictor, or the models to serve; the first is the default model. A ModelRegistry is used as it is.
        host: address to listen on, see recinfer.serving.wire.address. The default is reachable from this machine only.
        port: TCP port; 0 takes a free port.
        limits: bounds on requests.
        threads: number of threads for large requests; None: one per core, at most 4.
        http_port: TCP port of V1 and of the Open Inference Protocol's REST form, 0 takes a free port; None: no HTTP.
        metrics_port: TCP port of Prometheus metrics and the status page, 0 takes a free port; None: no metrics.
        batching: bounds of the queue and of merged runs.
        security: TLS and token; a host beyond loopback needs a token or ``client_ca`` (or ``insecure``).
        share_port: other processes may listen on the same port (SO_REUSEPORT); the system spreads connections.
        admin: the store from which the admin service loads versions, or its StoreManager; None: no admin service.
        admin_through: (name, serialized request) -> makes an admin call in all processes that share the port, in this
            process by its ``admin_calls``; needed for the admin service with ``share_port``.
        admin_open: offer the admin service to clients; False: only this process may use ``admin_calls``.
        shards: the fan-out for the predictors' lookups, where their rows are on other hosts.
        serving: whether health says SERVING once the server answers; see :meth:`set_serving`.
        unix_socket: gRPC listens on this Unix socket too, without TLS.
        cors_origins: origins whose pages may send requests over HTTP, see recinfer.serving.server.cors.
        drain_s: seconds that :meth:`stop` gives to running requests by default.
        idle_s: seconds after which a connection without a request is closed; None: 75 for HTTP, never for gRPC.

    Attributes:
        budget: memory budget of requests and answers over all protocols; its bytes are in ``limits``.

    >>> server = Server({"movies": recinfer.load("movies.rqa")}).start()    # doctest: +SKIP
    >>> InferenceClient(f"127.0.0.1:{server.port}").lookup(features)        # doctest: +SKIP
    >>> server.stop()                                                       # doctest: +SKIP
    """

    def __init__(
        self,
        predictors: Mapping[str, Predictor | ArchivedModel] | Iterable[ServedModel] | ModelRegistry,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        threads: int | None = None,
        http_port: int | None = None,
        metrics_port: int | None = None,
        batching: BatchConfig | None = None,
        security: Security | None = None,
        share_port: bool = False,
        admin: ModelStore | StoreManager | None = None,
        admin_through: Callable[[str, bytes], Awaitable[bytes]] | None = None,
        admin_open: bool = True,
        shards: FanOut | None = None,
        serving: bool = True,
        unix_socket: Path | None = None,
        cors_origins: Sequence[str] = (),
        drain_s: float = 10.0,
        idle_s: float | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise InputError(f"port: got {port}, expected 0 to 65535")
        self._security = security or Security()
        self._security.check_host(host)
        self._share_port = share_port
        registry = predictors if isinstance(predictors, ModelRegistry) else ModelRegistry(predictors)
        self.service = InferenceService(registry, limits)
        self.stats = self.service.stats
        self.observer = Observer(self.stats, sends_on=shards is not None)
        self.host = plain_host(host)
        self._port = port
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._server: CoreServer | None = None
        self._dispatcher: Dispatcher | None = None
        self._caller: LoopCaller | None = None
        self._health: EndingHealth | None = None
        self._batching = batching or BatchConfig()
        self.open_inference = OpenInference(self.service.registry, self.service.limits, self._answer, self.is_ready)
        self.admin_calls: dict[str, Answer] = {}
        self._admin_through = admin_through
        self._admin_open = admin_open
        if admin is not None:
            if share_port and admin_through is None:
                raise ConfigError("admin: it would change one of the processes that share the port; use one process")
            from recinfer.serving.engine.admin import AdminService

            manager = admin if isinstance(admin, StoreManager) else StoreManager(registry, admin)
            service = AdminService(manager, None if shards is None else shards.status, logs=admin_through is None)
            self.admin_calls = {k: self._with_health_update(call) for k, call in service.calls().items()}
        self._http: HttpServer | None = None
        self.http_port = http_port
        self._shards = shards
        self._serving = serving
        self._socket_file = None if unix_socket is None else SocketFile(unix_socket)
        self._cors_origins = cors_origins
        self._drain_s = drain_s
        self._idle_s = idle_s
        shown = None if shards is None else shards.status
        self.budget = MemoryBudget(self.service.limits.memory_budget_bytes)
        self._load: Load | None = None
        metrics = ServerMetrics(
            self.stats,
            self.service.registry,
            self.budget,
            lambda: None if self._dispatcher is None else self._dispatcher.scheduler.state,
            shards=shown,
            is_ready=self.is_ready,
            security=self._security.figures,
            load=lambda: 0.0 if self._load is None else self._load.now(),
        )
        self.status = metrics.status
        self._metrics: HttpServer | None = None
        self.metrics_port = metrics_port

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler (after ``start``)."""
        return None if self._dispatcher is None else self._dispatcher.scheduler

    @property
    def port(self) -> int:
        """The bound TCP port (after ``start``)."""
        return self._port

    @property
    def target(self) -> str:
        """The address to which a client connects."""
        return join_address(self.host, self._port)

    def start(self) -> Server:
        """Bind and accept requests; returns once the server answers. After an error no port is open.

        Raises:
            UnavailableError: an address cannot be bound.
        """
        if self._server is not None:
            raise InputError("start: the server already runs; make a new Server for a second one")
        run_start(self._start(), self.stop)
        return self

    def stop(self, grace: float | None = None) -> None:
        """Let running requests end for ``grace`` seconds (None: ``drain_s``), then close; a second call has no effect."""
        grace = self._drain_s if grace is None else grace
        if self._server is not None:
            run_on_loop(self._stop(grace), timeout=grace + STOP_SLACK_S)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _start(self) -> None:
        at_a_time = None if self._shards is None else MOST_FAN_OUTS
        dispatcher = self._dispatcher = Dispatcher(self.service, self._batching, self._threads, at_a_time)
        self._caller = LoopCaller(dispatcher)
        admission, limits = self._admission(dispatcher.scheduler), self.service.limits
        server = CoreServer(
            connection_options(limits, self._idle_s, share_port=self._share_port),
            admit=admission.admit,
            refused=admission.refused,
            dispatch=self._dispatched(dispatcher),
            turns=dispatcher.scheduler,
            budget=self.budget,
            most_bytes=limits.max_message_bytes,
        )
        server.add_generic_rpc_handlers(self._handlers())
        names = [SERVICE_NAME, OPEN_INFERENCE, *([_ADMIN_NAME] if self._shows_admin else [])]
        self._health = add_standard_services(server, names, _FILES, self._can_answer)
        await self._health.show(self._shown(), False)  # before the first connection
        if not self._share_port:
            check_address(self.host, self._port)
        self._port = bind(server, self._security, self.host, self._port)
        if self._socket_file is not None:
            self._socket_file.listen(server.add_insecure_port)
        await server.start()
        self._server = server
        self._tasks = [asyncio.create_task(work) for work in (tell_open_files(), follow_files(self._security))]
        threads = [
            server.thread_id,
            threading.get_native_id(),
            None if self._shards is None else self._shards.thread_id,
        ]
        self._load = Load(
            dispatcher.scheduler, most_runs=self._threads, most_fan_outs=MOST_FAN_OUTS, thread_ids=threads
        )
        if self.http_port is not None:
            await self._start_http(self.http_port)
        if self.metrics_port is not None:
            await self._start_metrics(self.metrics_port)
        await self._show_health()

    def set_serving(self, serving: bool) -> None:
        """Set whether health says SERVING of this server from now on."""
        self._serving = serving
        if self._server is not None:
            run_on_loop(self._show_health())

    def is_ready(self) -> bool:
        """Whether the server has started, reaches every needed rank and knows of no fault. Call on the serving loop."""
        return self._health is not None and self._health.is_ready()

    def _can_answer(self) -> bool:
        registry = self.service.registry
        if registry.faulty():
            return False
        models = (model for name in registry.names() for model in registry.versions(name).values())
        return all(model.predictor.state.lookups.can_answer() for model in models)

    def _shown(self) -> tuple[str, ...]:
        """The services that health reports."""
        return ("", SERVICE_NAME, OPEN_INFERENCE, *self.service.registry.names())

    async def _show_health(self) -> None:
        assert self._health is not None
        await self._health.show(self._shown(), self._serving)
        await self._health.show(self.service.registry.faulty(), False)

    async def _stop(self, grace: float) -> None:
        server, self._server = self._server, None
        if server is None or self._health is None or self._dispatcher is None:
            return
        for task in self._tasks:
            task.cancel()
        await self._health.end()
        if self._socket_file is not None:
            self._socket_file.remove()
        await asyncio.gather(server.stop(grace), *([self._http.stop(grace)] if self._http is not None else []))
        if self._metrics is not None:
            await self._metrics.stop()
        self._dispatcher.close()

    async def _answer(self, call: CallName, data: bytes) -> bytes:
        """Answer the request of a protocol that converts to recinfer's messages; called on the loop."""
        assert self._caller is not None
        return await self._caller.answer(call, data, deadline.get(), ticket_of_task.get())

    async def _get_model(self, data: bytes) -> bytes:
        return self.service.get_model(data)

    @property
    def event_s(self) -> float:
        """Seconds that gRPC's thread has spent on the current event; 0.0 while it waits for an event."""
        return 0.0 if self._server is None else self._server.event_s

    async def _start_http(self, port: int) -> None:
        from recinfer.serving.server.api_docs.page import ApiDocs
        from recinfer.serving.server.cors import Cors
        from recinfer.serving.server.http_server import HttpServer, ModelProtocol

        if not self._share_port:
            check_address(self.host, port)
        registry, limits, security = self.service.registry, self.service.limits, self._security
        kinds: list[type[ModelProtocol]] = [pkgutil.resolve_name(known.place) for known in HTTP_PROTOCOLS]
        protocols = [kind(registry, limits, self._answer, self.is_ready) for kind in kinds]
        http = HttpServer(
            # The last protocol's paths stand first in the error about an unknown path.
            [*reversed(protocols), ApiDocs(protocols, registry, limits, needs_token=bool(security.tokens))],
            self.budget,
            limits.max_message_bytes,
            self.host,
            port,
            allows=security.allows,
            tls=security.tls_context(lets_probes_in=True),
            needs_certificate=security.client_ca is not None,
            reuse_port=self._share_port,
            idle_s=self._idle_s,
            cors=Cors(self._cors_origins),
            observe=functools.partial(self.observer.answered, protocol="http"),
            begin=self.observer.begin,
        )
        await http.start()
        self._http, self.http_port = http, http.port

    async def _start_metrics(self, port: int) -> None:
        from recinfer.serving.server.telemetry.metrics_http import start_metrics

        self._metrics = await start_metrics(self.status, self.host, port, self._security)
        self.metrics_port = self._metrics.port

    def _admission(self, scheduler: Scheduler) -> Admission:
        # Small lookups in tables of this process do not enter the queue, and are never refused for its length.
        paths = {f"/{SERVICE_NAME}/Predict": "Predict"}
        if self._shards is not None:
            paths |= {f"/{SERVICE_NAME}/Lookup": "Lookup", f"/{OPEN_INFERENCE}/ModelInfer": "ModelInfer"}
        services = [service for file in _FILES for service in file.services_by_name.values()]
        return Admission(self._security, self.observer, scheduler.queue, paths, names_of(*services))

    def _dispatched(self, dispatcher: Dispatcher) -> dict[str, Dispatch]:
        """The Dispatch of each method whose messages are dispatched as they arrive."""
        calls: tuple[CallName, ...] = ("Lookup", "Predict")
        return {f"/{SERVICE_NAME}/{call}": dispatched(call, dispatcher, self.observer) for call in calls}

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Handlers of the methods that bypass the dispatcher."""

        def handlers(service: str, calls: Mapping[str, Answer]) -> grpc.GenericRpcHandler:
            return generic_handler(service, calls, self.observer)

        found = [
            handlers(SERVICE_NAME, {"GetModel": self._get_model}),
            handlers(OPEN_INFERENCE, self.open_inference.calls()),
        ]
        if self._shows_admin:
            through = self._admin_through
            calls = {name: self.admin_calls[name] for name in VERBS}
            if through is not None:
                calls = {call: functools.partial(through, call) for call in calls}
            found.append(handlers(_ADMIN_NAME, signed(calls, self._security)))
        return tuple(found)

    @property
    def _shows_admin(self) -> bool:
        return self._admin_open and bool(self.admin_calls)

    def _with_health_update(self, change: Answer) -> Answer:
        async def answer(data: bytes) -> bytes:
            """Make a change of the models, then update the health of the changed models."""
            registry = self.service.registry
            before, faulty_before = set(registry.names()), registry.faulty()
            response = await change(data)
            assert self._health is not None
            after, faulty = set(registry.names()), registry.faulty()
            for name in (before ^ after) | (faulty_before ^ faulty):
                status = "SERVICE_UNKNOWN" if name not in after else "NOT_SERVING" if name in faulty else "SERVING"
                await self._health.set(name, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
            return response

        return answer
