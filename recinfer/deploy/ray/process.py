"""Starts, monitors and stops one ``recinfer serve`` as a child process of a replica on a Ray node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import recinfer
from recinfer import env
from recinfer.deploy.ray.records import Server
from recinfer.serving import server_process

__all__ = ["ServerProcess"]


class ServerProcess:
    """Runs a server that stops when the thread that starts it ends (see recinfer.deploy.ray.child).

    Args:
        arguments: of ``recinfer serve``.
        environment: on top of this process's own.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        # The server must import the same recinfer as this process.
        root = str(Path(recinfer.__file__).resolve().parents[1])
        inherited = env.child_environment(**environment)
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
        before = [sys.executable, "-m", "recinfer.deploy.ray.child", str(os.getpid())]
        self._process = server_process.ServerProcess(*arguments, environment=inherited, before=before, shows_log=True)

    def look(self, server: Server) -> bool:
        """Write ports, process id and memory into ``server``; returns whether it runs. If not, ``why`` says how it
        ended."""
        code = self._process.poll()
        output = dict(self._process.output)
        if code is None:
            server.port, server.metrics_port = (int(output.get(name) or 0) for name in ("port", "metrics_port"))
            server.pid, server.memory = self._process.pid, self._process.resident_bytes()
            return True
        killed = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
        server.why = output["error"]["message"] if "error" in output else killed
        return False

    def stop(self, seconds: float) -> bool:
        """Have it finish its requests and exit, or kill it after ``seconds``; returns whether it exited by itself."""
        return self._process.stop(seconds)
