"""``recinfer serve --workers N``: the same command again, N times, below a supervisor."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from recinfer.cli.console import Output

__all__ = ["stop_with_parent", "supervise"]


def supervise(workers: int, host: str, port: int, output: Output) -> None:
    """Run this process's own command line in ``workers`` processes until SIGTERM or Ctrl-C."""
    from recinfer.serving.supervisor import Supervisor

    def command(bound: int) -> list[str]:
        # The last of two equal options counts.
        return [sys.executable, "-m", "recinfer", *sys.argv[1:], "--worker", "--json", "--port", str(bound)]

    def ready(answer: dict[str, Any]) -> None:
        name = f"{answer['model']} {answer['version']}"
        output.show(f"[green]serving[/green] {name} on {host}:{answer['port']} in {workers} processes  (Ctrl-C stops)")
        output.finish({**answer, "workers": workers})

    supervisor = Supervisor(command, workers, host, port, tell=output.note)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    supervisor.run(ready)
    output.note("stopped")


def stop_with_parent() -> threading.Event:
    """An event that is set when stdin ends: when the supervisor has gone, however it went."""
    gone = threading.Event()

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        gone.set()

    threading.Thread(target=watch, name="recinfer-parent", daemon=True).start()
    return gone
