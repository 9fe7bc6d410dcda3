"""A server in a Python program: for a ``with`` block, or until it is stopped."""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from recinfer.errors import ConfigError, InputError
from recinfer.serving.app.remote_archives import with_local_archives
from recinfer.serving.app.run import load_service
from recinfer.serving.app.service import Ready, ReadyModels, Report, Service
from recinfer.serving.config import AddressConfig, ModelsConfig, ServeConfig, TablesConfig
from recinfer.serving.wire.address import join_address
from recinfer.serving.wire.loop import run_on_loop

if TYPE_CHECKING:
    from recinfer.remote.cache import CachedArchive
    from recinfer.serving.client.client import InferenceClient

__all__ = ["RunningServer", "serve"]

_UNCLOSED_S = 5.0  # for the end of a server that nobody stopped
_log = logging.getLogger(__name__)


class RunningServer:
    """A server in this process, or workers below it. Its constructor returns once requests are accepted; ``stop``, or the
    end of a ``with`` block, ends it, also after an exception. A server to which nothing refers, or that runs when the program
    ends, ends too, without the grace period and with a ResourceWarning.

    Any thread may create one, also inside a running event loop. No signal handler is set.

    Args:
        config: the settings; a port 0 is a free port.
        report: takes lines of text about workers, and about the wait for shard servers.

    Attributes:
        config: the settings.
        ready: the content and the addresses of the server.

    Raises:
        ConfigError: settings that do not fit the files or this host.
        ArchiveError: an archive breaks a rule of its format, or answers a golden request wrongly.
        UnavailableError: an address cannot be bound, or a worker did not start.
    """

    def __init__(self, config: ServeConfig, report: Report = _log.info) -> None:
        config, self._cached = with_local_archives(config, report)
        self.config = config
        if config.address.log_json:
            from recinfer.serving.server.telemetry.observe import log_as_json

            log_as_json()
        security = config.security.read()
        self._security = security
        self._service = load_service(config, security, report)
        self.ready: Ready = self._service.start()
        self._end = weakref.finalize(self, _end_unclosed, self._shown(), self._service, self._cached, os.getpid())

    @property
    def target(self) -> str:
        """The address of the gRPC port, ``"127.0.0.1:8500"``."""
        return join_address(self.ready.host, self.ready.port)

    @property
    def url(self) -> str | None:
        """The URL of the HTTP port without a slash at its end, ``"http://127.0.0.1:8080"``; None without an HTTP port."""
        port = self.ready.http_port if isinstance(self.ready, ReadyModels) else None
        return None if port is None else self._url(port)

    @property
    def metrics_url(self) -> str | None:
        """The URL of the metrics port without a slash at its end; None without a metrics port."""
        return None if self.ready.metrics_port is None else self._url(self.ready.metrics_port)

    def client(self, **options: Any) -> InferenceClient:
        """A new client of the server, with its token.

        Args:
            options: further arguments of InferenceClient; a server with TLS needs ``tls_ca``.

        Raises:
            InputError: the server is a shard server, which has no clients but rankers; or a wrong option.
        """
        from recinfer.serving.client.client import InferenceClient

        if not isinstance(self.ready, ReadyModels):
            raise InputError("client: this is a shard server; connect to a ranker")
        return InferenceClient(self.target, **{"token": next(iter(self._security.tokens), ""), **options})

    def status(self) -> dict[str, Any]:
        """The figures of ``/status.json`` on a metrics port; the server needs no such port. Waits for the serving loop."""
        return run_on_loop(self._service.status())

    def stop(self, grace: float | None = None) -> None:
        """Let running requests end for ``grace`` seconds (None: ``drain_seconds``), then close; once."""
        if self._end.detach() is not None:
            _stop(self._service, self._cached, self.config.address.drain_seconds if grace is None else grace)

    def __repr__(self) -> str:
        return self._shown() if self._end.alive else f"<stopped server of {self._content}>"

    @property
    def _content(self) -> str:
        held = self.ready.serving if isinstance(self.ready, ReadyModels) else self.ready.held
        return ", ".join(held) or "no model"

    def _shown(self) -> str:
        ports = {"gRPC": self.target, "REST": self.url, "metrics": self.metrics_url}
        return f"<server of {self._content}: {', '.join(f'{name} {at}' for name, at in ports.items() if at)}>"

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _url(self, port: int) -> str:
        secure = "s" if self.config.security.tls_cert is not None else ""
        return f"http{secure}://{join_address(self.ready.host, port)}"


def _stop(service: Service, cached: list[CachedArchive], grace: float) -> None:
    try:
        service.stop(grace)
    finally:
        for archive in cached:
            archive.release()


def _end_unclosed(shown: str, service: Service, cached: list[CachedArchive], process: int) -> None:
    """End a server that nobody stopped; called by any thread while it collects garbage, or at the end of the program."""
    if os.getpid() != process:
        return  # a fork, without the server's threads
    # In a thread of its own: this one may be a thread that the end waits for.
    thread = threading.Thread(target=_stop, args=(service, cached, 0.0), name="recinfer-end")
    thread.start()
    warnings.warn(f"unclosed {shown}; use a with block, or stop()", ResourceWarning, stacklevel=2)
    if threading.current_thread() is threading.main_thread():
        thread.join(_UNCLOSED_S)


def serve(
    config: ServeConfig | str | os.PathLike[str] | None = None,
    *,
    host: str = AddressConfig.host,
    port: int = AddressConfig.port,
    http_port: int | Literal["auto"] | None = "auto",
    metrics_port: int | None = None,
    model_store: str | os.PathLike[str] | None = None,
    poll: float | None = None,
    admin: bool = False,
    workers: int = 1,
    device: Literal["cpu", "cuda"] = TablesConfig.device,
) -> RunningServer:
    """Serve an archive or a model store in this process, for a ``with`` block or until ``stop``.

    Args:
        config: the folder or URL of an archive, or all settings; with all settings no other argument may be given.
        host, port, metrics_port: see AddressConfig: by default a free port of this host, and no metrics port.
        http_port: TCP port of REST; 0: a free port; ``"auto"``: a free port where the ``serve`` extra is installed, else none;
            None: no REST.
        model_store, poll, admin, workers: see ModelsConfig. Several workers are processes of their own.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: nothing to serve, or arguments that do not go together.
        ArchiveError: the archive breaks a rule of its format, or answers a golden request wrongly.
        UnavailableError: an address cannot be bound, or a worker did not start.

    >>> with recinfer.serve("movielens.rqa") as server:                    # doctest: +SKIP
    ...     print(server.target, server.url)
    ...     embeddings = server.client().lookup({"user_id": [[3]], "item_id": [[4]]})
    """
    tables = TablesConfig(device)
    store = model_store if model_store is None or isinstance(model_store, str) else Path(model_store)
    models = ModelsConfig(model_store=store, poll=poll, admin=admin, workers=workers)
    if isinstance(config, ServeConfig):
        address = AddressConfig(host, port, None if http_port == "auto" else http_port, metrics_port)
        if (address, tables, models) != (AddressConfig(), TablesConfig(), ModelsConfig()):
            raise ConfigError("serve: got a ServeConfig and other arguments, expected them in the ServeConfig")
        return RunningServer(config)
    if http_port == "auto":
        http_port = 0 if find_spec("aiohttp") is not None else None
    address = AddressConfig(host, port, http_port, metrics_port)
    archives = () if config is None else (config if isinstance(config, str) else Path(config),)
    return RunningServer(ServeConfig(archives, address, tables, models))
