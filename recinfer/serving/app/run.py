"""Runs a server from its configuration until a signal ends it."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from recinfer.serving.app.remote_archives import with_local_archives
from recinfer.serving.app.service import Ready, Report, Service
from recinfer.serving.config import ServeConfig

if TYPE_CHECKING:
    from recinfer.serving.server.security import Security

__all__ = ["load_service", "serve_until_signal"]

_STDERR = 2  # file descriptor
_log = logging.getLogger(__name__)


def serve_until_signal(
    config: ServeConfig,
    *,
    on_ready: Callable[[Ready], None] = lambda _: None,
    report: Report = _log.info,
    worker: bool = False,
    debug: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT (Ctrl-C), then let running requests end. Call from the main thread of a process that
    does nothing else: logging, signals and Python's thread switching are set for serving.

    Args:
        on_ready: called once requests are accepted, with the content and the addresses of the server.
        report: takes lines of text about workers, and about the wait for shard servers.
        worker: whether this process is a worker, whose stdin is the connection to its supervisor.
        debug: the workers that this process starts show tracebacks of expected errors.

    Raises:
        ConfigError: settings that do not fit the files or this host.
        ArchiveError: an archive breaks a rule of its format, or answers a golden request wrongly.
        UnavailableError: an address cannot be bound.
    """
    # A mapped file that is cut short ends the process by SIGBUS, which itself prints nothing.
    faulthandler.enable(_STDERR)
    if config.address.log_json:
        from recinfer.serving.server.telemetry.observe import log_as_json

        log_as_json()
    else:
        from recinfer.serving.engine.change_log import show_changes

        show_changes()
    security = config.security.read(worker=worker)
    config, cached = with_local_archives(config, report)  # kept for as long as the server runs
    load_service(config, security, report, worker=worker, debug=debug).run(on_ready)
    del cached


def load_service(
    config: ServeConfig,
    security: Security,
    report: Report,
    *,
    worker: bool = False,
    debug: bool = False,
) -> Service:
    """The server of the configuration's role, with its models loaded."""
    security.check_host(config.address.host)
    security.credentials()  # fails for a missing file before any table is read
    if config.models.workers > 1 and not worker:
        from recinfer.serving.app.workers import WorkersService

        return WorkersService(config, security, report, debug=debug)
    if config.role.ranks is not None:
        from recinfer.serving.app.shards import ShardService

        return ShardService(config, security)
    from recinfer.serving.app.models import ModelService
    from recinfer.serving.workers.worker import WorkerLink

    return ModelService(config, security, report, WorkerLink() if worker else None)
