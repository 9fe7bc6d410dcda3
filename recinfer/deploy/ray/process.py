"""Starts, monitors and stops one ``recinfer serve`` as a child process of a replica on a Ray node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import recinfer
from recinfer import env
from recinfer.deploy.ray.records import Server

__all__ = ["ServerProcess"]


class ServerProcess:
    """Runs a server that stops when the thread that starts it ends (see recinfer.deploy.ray.child).

    Args:
        arguments: of ``recinfer serve``.
        environment: on top of this process's own.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        serve = [sys.executable, "-m", "recinfer", "serve", *arguments, "--json"]
        # The server must import the same recinfer as this process.
        root = str(Path(recinfer.__file__).resolve().parents[1])
        inherited = env.child_environment(**environment)
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recinfer.deploy.ray.child", str(os.getpid()), *serve],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited,
            start_new_session=True,
        )
        self._output: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, name="recinfer-output", daemon=True)
        self._reader.start()

    def look(self, server: Server) -> bool:
        """Write ports, process id and memory into ``server``; returns whether it runs. If not, ``why`` says how it
        ended."""
        code = self._process.poll()
        if code is None:
            output = dict(self._output)
            server.port, server.metrics_port = (int(output.get(name) or 0) for name in ("port", "metrics_port"))
            server.pid, server.memory = self._process.pid, _resident(self._process.pid)
            return True
        self._reader.join(1.0)  # the last line of the output says why the server ended
        killed = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
        server.why = self._output["error"]["message"] if "error" in self._output else killed
        return False

    def stop(self, seconds: float) -> bool:
        """Have it finish its requests and exit, or kill it after ``seconds``; returns whether it exited by itself."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    self._output.update(found)


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
