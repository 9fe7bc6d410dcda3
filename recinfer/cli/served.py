"""Runs ``recinfer serve`` as a child process for the duration of a ``with`` block."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from recinfer.errors import UnavailableError

__all__ = ["served"]

_STOP_S = 30.0


@contextmanager
def served(archive: Path, *options: str) -> Iterator[str]:
    """Serve ``archive`` with more ``options`` on a free loopback port and yield its target, ``"127.0.0.1:port"``.

    The server is a separate process, so that measurements through it equal those of a user's client. SIGTERM stops it at
    the end of the block, also after an error.

    Raises:
        UnavailableError: the server ended before it was ready, or did not stop cleanly; the message has its last line.
    """
    command = [sys.executable, "-m", "recinfer", "serve", str(archive), "--port", "0", "--json", *options]
    with tempfile.TemporaryFile("w+") as log:
        # A separate session: Ctrl-C in the terminal reaches only this process, which stops the server.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()  # one JSON object: the address, or the error
            if not line:
                process.wait(_STOP_S)
                raise UnavailableError(f"the server of {archive} ended before it was ready: {_last_line(log)}")
            ready = json.loads(line)
            if "error" in ready:
                raise UnavailableError(f"the server of {archive} did not start: {ready['error']['message']}")
            yield f"127.0.0.1:{ready['port']}"
        finally:
            code = _stop(process)
        if code != 0:
            raise UnavailableError(f"the server of {archive} ended with exit code {code}: {_last_line(log)}")


def _stop(process: subprocess.Popen[str]) -> int:
    process.terminate()
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "it printed nothing"
