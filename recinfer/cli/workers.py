"""``recinfer serve --workers N``: the same command again, N times, below a supervisor."""

from __future__ import annotations

import base64
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer import env
from recinfer.cli.addresses import show_addresses
from recinfer.cli.console import Output
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.cli.serve_options import ServeOptions
    from recinfer.serving.server.security import Security

__all__ = ["supervise", "worker_command", "worker_options"]


def worker_command(arguments: Sequence[str], port: int, http_port: int | None) -> list[str]:
    """The command of a worker of ``recinfer *arguments``.

    The option ``--worker`` comes directly after the command. After the user's arguments it could become the value of an
    incomplete option, or the name of an archive, and the "worker" would start workers too.
    """
    at = arguments.index("serve") + 1
    options = ["--worker", "--json", "--worker-port", str(port)]
    if http_port is not None:
        options += ["--worker-http-port", str(http_port)]
    return [sys.executable, "-m", "recinfer", *arguments[:at], *options, *arguments[at:]]


def worker_options(options: ServeOptions) -> ServeOptions:
    """``options`` of a worker, with the ports that its supervisor holds; the ports of the command line may be 0."""
    if options.worker_port is None:
        return options
    address = replace(options.address, port=options.worker_port, http_port=options.worker_http_port)
    return replace(options, address=address)


def supervise(
    workers: int,
    host: str,
    port: int,
    output: Output,
    *,
    http_port: int | None = None,
    metrics_port: int | None = None,
    security: Security,
    one_first: bool = False,
    timeout: float,
    store: Path | None = None,
    poll: float | None = None,
    model_config: Path | None = None,
    is_ranker: bool = False,
) -> None:
    """Run this process's own command line in ``workers`` processes until SIGTERM or Ctrl-C.

    The metrics port is this process's own: it shows the sum of what the workers count. The others are held here and
    shared by the workers only: a second server on one of them fails, instead of sharing it without an error message.

    Args:
        store, poll, model_config: the model store that this process follows for all workers, how often, and by which file.
        is_ranker: the workers are rankers.
    """
    from recinfer.serving.engine.poll import PollLoop, StorePoller
    from recinfer.serving.wire.address import hold_address
    from recinfer.serving.workers.supervisor import Supervisor

    arguments = sys.argv[1:]
    if "serve" not in arguments:
        raise ConfigError("workers: their command is this process's own; start it as `recinfer serve`")

    http = None if http_port is None else hold_address(host, http_port)
    bound_http = None if http is None else int(http.getsockname()[1])

    def command(bound: int) -> list[str]:
        return worker_command(arguments, bound, bound_http)

    environment = None if security.token is None else env.child_environment(RECINFER_TOKEN=security.token)
    supervisor = Supervisor(
        command,
        workers,
        host,
        port,
        timeout=timeout,
        report=output.note,
        one_first=one_first,
        environment=environment,
    )
    changes = supervisor.changes

    def change(call: str, data: bytes) -> str:
        return changes.submit(call, base64.b64encode(data).decode()).result()

    loop = None
    if store is not None and (poll is not None or model_config is not None):
        loop = PollLoop(StorePoller(store, change, lambda: changes.state, model_config, is_ranker=is_ranker), poll)
    if loop is not None or is_ranker:

        def reload() -> None:
            if loop is not None:
                loop.reload()
            if is_ranker:
                supervisor.hang_up()

        signal.signal(signal.SIGHUP, lambda *_: reload())
    shown = _MetricsPort(supervisor.status, host, metrics_port, security)

    def ready(answer: dict[str, Any]) -> None:
        bound = shown.start()
        what = f"{', '.join(answer['serving'])} in {workers} processes"
        tls = security.tls_cert is not None
        ports = {"http_port": answer["http_port"], "metrics_port": bound}
        show_addresses(output, what, host, answer["port"], **ports, tls=tls, engines=answer["engines"])
        output.finish({**answer, "metrics_port": bound, "workers": workers})
        if loop is not None:
            loop.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    try:
        supervisor.run(ready)
    finally:
        shown.stop()
        if loop is not None:
            loop.stop()
        if http is not None:
            http.close()
    output.note("stopped")


class _MetricsPort:
    """The supervisor's metrics port, if the options name one."""

    def __init__(self, status: Any, host: str, port: int | None, security: Security) -> None:
        self._metrics: Any = None
        if port is None:
            return
        import asyncio

        from recinfer.serving.server.telemetry.metrics_http import metrics_server
        from recinfer.serving.wire.address import check_address

        async def summed() -> Any:
            return await asyncio.to_thread(status)  # status() waits for the workers

        check_address(host, port)
        self._metrics = metrics_server(summed, host, port, security)

    def start(self) -> int | None:
        """Bind and answer; returns the port, or None without one."""
        if self._metrics is None:
            return None
        from recinfer.serving.wire.loop import run_on_loop

        run_on_loop(self._metrics.start())
        return int(self._metrics.port)

    def stop(self) -> None:
        """Close the port."""
        if self._metrics is not None:
            from recinfer.serving.wire.loop import run_on_loop

            run_on_loop(self._metrics.stop(), timeout=5.0)
