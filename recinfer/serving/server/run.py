"""Serves in the main thread until a signal ends it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.scheduler import BatchConfig
from recinfer.serving.engine.store import ModelStore, StoreManager
from recinfer.serving.server.grpc_methods import until_signalled
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server, Shards
from recinfer.serving.server.tuning import tune_process
from recinfer.serving.wire.limits import Limits

if TYPE_CHECKING:
    from recinfer.inference.predictor import Predictor

__all__ = ["serve"]


def serve(
    predictors: Mapping[str, Predictor] | Iterable[ServedModel] | ModelRegistry,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    limits: Limits | None = None,
    http_port: int | None = None,
    metrics_port: int | None = None,
    batching: BatchConfig | None = None,
    security: Security | None = None,
    share_port: bool = False,
    admin: ModelStore | StoreManager | None = None,
    admin_through: Callable[[str, bytes], Awaitable[bytes]] | None = None,
    admin_open: bool = True,
    shards: Shards | None = None,
    serving: bool = True,
    grace: float = 10.0,
    on_ready: Callable[[int], None] | None = None,
    on_start: Callable[[Server], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (Ctrl-C), then drain for up to ``grace`` seconds. Call from the main thread.

    Args:
        http_port, metrics_port, batching, security, share_port, admin, admin_through, admin_open, shards, serving: as
            :class:`Server` has them.
        stop: set by someone else to end serving, as a signal does.
        on_ready: called with the bound port once requests are accepted.
        on_start: called with the server before that, when its models are in place.
        on_hangup: called at each SIGHUP, which ends the process when this is None.
    """
    tune_process()
    server = Server(
        predictors,
        host,
        port,
        limits=limits,
        http_port=http_port,
        metrics_port=metrics_port,
        batching=batching,
        security=security,
        share_port=share_port,
        admin=admin,
        admin_through=admin_through,
        admin_open=admin_open,
        shards=shards,
        serving=serving,
    )

    def start() -> None:
        if on_start is not None:
            on_start(server)
        server.start()
        if on_ready is not None:
            on_ready(server.port)

    until_signalled(start, lambda: server.stop(grace), wanted=stop, on_hangup=on_hangup)
