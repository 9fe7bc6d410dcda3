"""Several serving processes on one port: started, watched, restarted when one dies, drained together at the end.

The supervisor loads no model and takes no traffic. It holds the port (bound, not listening), so that the workers can
share it (SO_REUSEPORT) and nobody else takes it between two of them.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from recinfer.errors import ConfigError, UnavailableError
from recinfer.serving.address import check_address

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
_STEADY_S = 10.0  # a worker that served this long starts again at once


class Supervisor:
    """Keeps ``workers`` processes serving one port.

    Args:
        command: port -> the command of one worker. It serves that port with SO_REUSEPORT, prints one line of JSON to
            stdout when it takes requests, and drains when its stdin ends or on SIGTERM.
        workers: how many.
        host, port: where; port 0 takes a free one.
        grace: seconds a worker has to drain.
        tell: gets one line of text for each worker that died or came back.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        workers: int,
        host: str,
        port: int,
        *,
        grace: float = 10.0,
        tell: Callable[[str], None] = _log.warning,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers: got {workers}, expected at least 1")
        self._command, self._host, self._grace, self._tell = command, host, grace, tell
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._ready = [threading.Event() for _ in range(workers)]
        self._failed: str | None = None
        self._answer: dict[str, Any] = {}
        self._socket = _hold(host, port)
        self.port: int = self._socket.getsockname()[1]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        with self._lock:
            return [process.pid for process in self._processes.values() if process.poll() is None]

    def run(self, on_ready: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Serve until ``stop``.

        Args:
            on_ready: called once, when all workers take requests, with what the first said.

        Raises:
            UnavailableError: a worker ended before it was ever ready: the same would happen to its successor.
        """
        slots = [threading.Thread(target=self._keep, args=(slot,), daemon=True) for slot in range(len(self._ready))]
        for thread in slots:
            thread.start()
        try:
            for ready in self._ready:
                while not ready.wait(0.05) and not self._stop.is_set():
                    pass
            if not self._stop.is_set() and on_ready is not None:
                on_ready(self._answer)
            # Not _stop.wait(): a signal handler in this thread that sets _stop could find its lock taken by this thread.
            while not self._stop.is_set():
                time.sleep(0.05)
        finally:
            self.stop()
            end = time.monotonic() + self._grace + 5.0
            for thread in slots:
                thread.join(max(0.0, end - time.monotonic()))
            with self._lock:
                left = list(self._processes.values())
            for process in left:
                process.kill()
            self._socket.close()
        if self._failed is not None:
            raise UnavailableError(self._failed)

    def stop(self) -> None:
        """Have all workers drain and end; from any thread or a signal handler."""
        self._stop.set()
        for process in list(self._processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _keep(self, slot: int) -> None:
        """Run one worker after another in ``slot`` until the end."""
        pause = 0.0
        while not self._stop.wait(pause):
            started = time.monotonic()
            process = subprocess.Popen(
                list(self._command(self.port)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches us alone, and we drain them
            )
            with self._lock:
                self._processes[slot] = process
            if self._stop.is_set():
                process.terminate()
            said = self._wait_ready(process, slot)
            code = process.wait()
            with self._lock:
                self._processes.pop(slot, None)
            if self._stop.is_set():
                return
            why = f"worker {slot} (process {process.pid}) {_reason(code)}"
            if not self._ready[slot].is_set():
                self._failed = f"{why} before it was ready{said}"
                self.stop()
                return
            lived = time.monotonic() - started
            pause = 0.0 if lived > _STEADY_S else min(_MAX_BACKOFF_S, max(_BACKOFF_S, 2 * pause))
            self._tell(f"{why} after {lived:.1f} s; the others serve, another starts in {pause:g} s")

    def _wait_ready(self, process: subprocess.Popen[str], slot: int) -> str:
        """Read the worker's line; returns what went wrong, as text to put behind a message."""
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            answer = json.loads(line) if line else {}
        except ValueError:
            answer = {}
        if "port" in answer:
            if self._ready[slot].is_set():
                self._tell(f"worker {slot} serves again (process {process.pid})")
            self._answer = self._answer or answer
            self._ready[slot].set()
            return ""
        return f": {answer['error']['message']}" if "error" in answer else ""


def _hold(host: str, port: int) -> socket.socket:
    """A socket bound to the address and not listening; with SO_REUSEPORT, so that workers can bind it too."""
    check_address(host, port)
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return held


def _reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
