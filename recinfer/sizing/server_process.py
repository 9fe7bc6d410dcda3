"""Starts servers of an archive for measurements: ``recinfer serve`` in separate processes, on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from recinfer.errors import UnavailableError
from recinfer.files import write_file

__all__ = ["ServerProcess", "ranker_and_shard"]

_START_S, _STOP_S = 300.0, 20.0


class ServerProcess:
    """``recinfer serve ARGUMENTS`` on a free loopback port, as a context manager.

    Attributes:
        target: ``"host:port"``.
    """

    def __init__(self, *arguments: str | Path) -> None:
        self._command = [sys.executable, "-m", "recinfer", "serve", *map(str, arguments), "--port", "0", "--json"]
        self.target = ""

    def __enter__(self) -> ServerProcess:
        self._errors = tempfile.TemporaryFile()
        # A separate session: Ctrl-C reaches only the parent, which stops this process.
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        try:
            self.target = f"127.0.0.1:{self._port()}"
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the process: SIGTERM, then SIGKILL if it does not end."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime

    def _port(self) -> int:
        assert self._process.stdout is not None
        overdue = threading.Timer(_START_S, self._process.kill)
        overdue.start()
        try:
            for line in self._process.stdout:
                if line.startswith(b"{"):
                    found = json.loads(line)
                    if "port" in found:
                        return int(found["port"])
        finally:
            overdue.cancel()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        raise UnavailableError(
            f"the server did not start: {' '.join(self._command[1:])}: {said[-1] if said else 'it printed nothing'}"
        )


@contextmanager
def ranker_and_shard(archive: Path, world_size: int) -> Iterator[list[ServerProcess]]:
    """A ranker and one shard server that holds all ``world_size`` ranks of ``archive``; the ranker is the first of the two."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shard = stack.enter_context(ServerProcess(archive, "--ranks", f"0-{world_size - 1}"))
        listed = {str(rank): [shard.target] for rank in range(world_size)}
        path = folder / "shards.json"
        write_file(path, json.dumps({"format": "recinfer.shards", "version": 1, "ranks": listed}).encode())
        ranker = stack.enter_context(ServerProcess(archive, "--shards", path))
        yield [ranker, shard]
