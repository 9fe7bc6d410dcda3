"""Runs ``recinfer serve`` as a child process on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from recinfer.errors import UnavailableError
from recinfer.files import write_file

__all__ = ["START_S", "ServerProcess", "end_with_parent", "ranker_and_shard", "served"]

START_S = 300.0
"""Seconds that a measured server may take to start."""
_STOP_S = 30.0
_LAST_WORDS_S = 1.0  # for the unread output of an ended process
_CHILD = """
from recinfer.serving.server_process import end_with_parent
end_with_parent()
from recinfer.__main__ import main
main()
"""


class ServerProcess:
    """``recinfer serve ARGUMENTS --json`` as a child process. Its constructor starts it; a ``with`` block waits until it
    serves, and stops it at the end. The server also ends when this process does, even by SIGKILL.

    Args:
        arguments: of ``recinfer serve``.
        start_s: seconds after which a ``with`` block ends a server that does not serve yet; None: no limit.

    Attributes:
        output: the JSON objects that the server has printed so far, merged: its ports, or ``error``.
    """

    def __init__(
        self,
        *arguments: str | Path,
        start_s: float | None = None,
    ) -> None:
        self.output: dict[str, Any] = {}
        self._text = " ".join(("recinfer serve", *map(str, arguments)))
        self._start_s = start_s
        command = [sys.executable, "-c", _CHILD, "serve", *map(str, arguments), "--json"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - for error messages
        stdin, held = os.pipe()
        self._held = open(held, "wb", buffering=0)  # noqa: SIM115 - the end of this pipe ends the server
        try:
            # A separate session: Ctrl-C in the terminal reaches only this process, which stops the server.
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        self._reported = threading.Event()
        self._reader = threading.Thread(target=self._read, name="recinfer-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def target(self) -> str:
        """The address of its gRPC port, once it serves."""
        return f"127.0.0.1:{self.output['port']}"

    def poll(self) -> int | None:
        """The exit code, negative for a signal, with all output in ``output`` then; None while the process runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(_LAST_WORDS_S)
        return code

    def wait_until_serving(self, seconds: float | None = None) -> None:
        """Wait until the server has printed its ports.

        Raises:
            UnavailableError: it ended before, or took longer than ``seconds``; the message has its reason.
        """
        if not self._reported.wait(seconds):
            raise UnavailableError(f"the server did not start: {self._text}: it did not serve within {seconds:g} s")
        if "port" not in self.output:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            reason = self.output["error"]["message"] if "error" in self.output else self.last_line()
            raise UnavailableError(f"the server did not start: {self._text}: {reason}")

    def stop(self, seconds: float = _STOP_S) -> bool:
        """Send SIGTERM, and SIGKILL after ``seconds``; returns whether the process ended before."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime

    def last_line(self) -> str:
        """The last line of the server's log, for error messages."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_until_serving(self._start_s)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self.stop()
        self._held.close()
        self._reader.join(_LAST_WORDS_S)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    self.output.update(found)
                    self._reported.set()
        self._reported.set()


def end_with_parent() -> None:
    """Have the pipe at stdin end this process by SIGTERM, in a process that a :class:`ServerProcess` started."""

    def watch() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="recinfer-parent", daemon=True).start()


@contextmanager
def served(archive: Path, *options: str) -> Iterator[str]:
    """Serve ``archive`` with more ``options`` on a free loopback port and yield its target, ``"127.0.0.1:port"``.

    The server is a separate process, so that measurements through it equal those of a user's client. SIGTERM stops it at
    the end of the block, also after an error.

    Raises:
        UnavailableError: the server ended before it was ready, or did not stop cleanly; the message has its last line.
    """
    server = ServerProcess(archive, "--port", "0", *options)
    with server:
        yield server.target
    code = server.poll()
    if code != 0:
        raise UnavailableError(f"the server of {archive} ended with exit code {code}: {server.last_line()}")


@contextmanager
def ranker_and_shard(archive: Path, world_size: int) -> Iterator[list[ServerProcess]]:
    """A ranker and one shard server that holds all ``world_size`` ranks of ``archive``; the ranker is the first of the two."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = f"0-{world_size - 1}"
        shard = stack.enter_context(ServerProcess(archive, "--ranks", ranks, "--port", "0", start_s=START_S))
        listed = {str(rank): [shard.target] for rank in range(world_size)}
        path = folder / "shards.json"
        write_file(path, json.dumps({"format": "recinfer.shards", "version": 1, "ranks": listed}).encode())
        ranker = stack.enter_context(ServerProcess(archive, "--shards", path, "--port", "0", start_s=START_S))
        yield [ranker, shard]
