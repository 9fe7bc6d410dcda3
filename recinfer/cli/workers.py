"""``recinfer serve --workers N``: the same command again, N times, below a supervisor."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from recinfer import env
from recinfer.cli.console import Output

if TYPE_CHECKING:
    from recinfer.serving.security import Security

__all__ = ["supervise"]


def supervise(
    workers: int,
    host: str,
    port: int,
    output: Output,
    *,
    metrics_port: int | None = None,
    security: Security,
    one_first: bool = False,
) -> None:
    """Run this process's own command line in ``workers`` processes until SIGTERM or Ctrl-C.

    The metrics port is this process's own: it shows the sum of what the workers count.
    """
    from recinfer.serving.supervisor import Supervisor

    def command(bound: int) -> list[str]:
        # The last of two equal options counts.
        return [sys.executable, "-m", "recinfer", *sys.argv[1:], "--worker", "--json", "--port", str(bound)]

    environment = None if security.token is None else env.child_environment(RECINFER_TOKEN=security.token)
    supervisor = Supervisor(
        command, workers, host, port, tell=output.note, one_first=one_first, environment=environment
    )
    shown = _Shown(supervisor.status, host, metrics_port, security)

    def ready(answer: dict[str, Any]) -> None:
        bound = shown.start()
        name = f"{answer['model']} {answer['version']}"
        output.show(f"[green]serving[/green] {name} on {host}:{answer['port']} in {workers} processes  (Ctrl-C stops)")
        if bound is not None:
            output.show(f"status page on http://{host}:{bound}/")
        output.finish({**answer, "metrics_port": bound, "workers": workers})

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    try:
        supervisor.run(ready)
    finally:
        shown.stop()
    output.note("stopped")


class _Shown:
    """The metrics port, when there is one."""

    def __init__(self, status: Any, host: str, port: int | None, security: Security) -> None:
        self._door: Any = None
        if port is None:
            return
        import asyncio

        from recinfer.serving.address import check_address
        from recinfer.serving.metrics_http import MetricsDoor

        async def beside() -> Any:
            return await asyncio.to_thread(status)  # it waits for the workers

        check_address(host, port)
        self._door = MetricsDoor(beside, host, port, allows=security.allows, tls=security.tls_context())

    def start(self) -> int | None:
        """Bind and answer; the port."""
        if self._door is None:
            return None
        from recinfer.serving.loop import run_on_loop

        run_on_loop(self._door.start())
        return int(self._door.port)

    def stop(self) -> None:
        """Close the port."""
        if self._door is not None:
            from recinfer.serving.loop import run_on_loop

            run_on_loop(self._door.stop(), timeout=5.0)
