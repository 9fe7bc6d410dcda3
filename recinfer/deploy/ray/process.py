"""Starts, monitors and stops one ``recinfer serve`` as a child process, for an actor on a Ray node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recinfer
from recinfer import env
from recinfer.files import write_file

__all__ = ["Life", "ServerProcess"]

_FILE = "shards.json"


@dataclass(frozen=True)
class Life:
    """The state of a server process.

    Attributes:
        running: whether it has not ended.
        port, metrics_port: the ports that it listens on; 0 before that.
        pid: of the server; 0 before it has started.
        memory: resident bytes, including mapped tables that were read.
        why: its error message, or how it ended.
    """

    running: bool
    port: int = 0
    metrics_port: int = 0
    pid: int = 0
    memory: int = 0
    why: str = ""


class ServerProcess:
    """Runs a server that ends with the process that started it (see recinfer.deploy.ray.guard). No method blocks on the
    server.

    Args:
        arguments: of ``recinfer serve``.
        environment: on top of this process's own.
        shards: a ranker's shards.json, written to a folder that is removed with the server; None for a shard server.
        tag: part of that folder's name.
        grace: seconds that the server has to finish its requests.

    Attributes:
        folder: folder of shards.json; None for a shard server.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        shards: str | None = None,
        tag: str = "0",
        grace: float = 15.0,
    ) -> None:
        command = [sys.executable, "-m", "recinfer.deploy.ray.guard", "--grace", str(grace)]
        serve = [sys.executable, "-m", "recinfer", "serve", *arguments, "--json"]
        self.folder: Path | None = None
        if shards is not None:
            self.folder = Path(tempfile.mkdtemp(prefix=f"recinfer-{tag}-"))
            self.write(shards)
            command += ["--folder", str(self.folder)]
            serve += ["--shards", str(self.folder / _FILE)]
        # The server must import the same recinfer as this process.
        root = str(Path(recinfer.__file__).resolve().parents[1])
        inherited = env.child_environment(**environment)
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [*command, "--", *serve],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited,
            start_new_session=True,
        )
        self._output: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, name="recinfer-output", daemon=True)
        self._reader.start()

    @property
    def guard_pid(self) -> int:
        """Process id of the guard between this process and the server."""
        return self._process.pid

    def look(self) -> Life:
        """The current state."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(1.0)
        output = dict(self._output)
        pid = int(output.get("pid", 0))
        why = output["error"]["message"] if "error" in output else ""
        if code is not None and not why:
            why = f"ended with exit code {code}" if code < 128 else f"was killed by signal {code - 128}"
        running = code is None
        return Life(
            running=running,
            port=int(output.get("port") or 0),
            metrics_port=int(output.get("metrics_port") or 0),
            pid=pid,
            memory=_resident(pid) if running and pid else 0,
            why=why,
        )

    def write(self, shards: str) -> None:
        """Replace shards.json; the ranker reads it within half a second."""
        if self.folder is None or not self.folder.is_dir():
            return  # the server has ended, and its folder was removed
        write_file(self.folder / _FILE, shards.encode())

    def stop(self) -> None:
        """Ask it to finish its requests and exit; ``look`` shows when it has."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for its end; returns whether it ended. Its last output is then available."""
        end = time.monotonic() + seconds
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(max(0.0, end - time.monotonic()))
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
