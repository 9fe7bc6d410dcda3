"""A supervisor's view of one worker process: the connection to it, its last status, and the time since its last answer."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from recinfer.serving.server.telemetry.metrics import Status
from recinfer.serving.workers.connection import PeerConnection

__all__ = ["WorkerProcess"]

_LAST_WORDS_S = 5.0  # for unread messages of an ended process


class WorkerProcess:
    """A started worker process. May be used from any thread.

    Args:
        slot: number of the worker; its replacement gets the same number.
        command: program and arguments; the stdin of the process is the connection (see recinfer.serving.workers.worker).
        environment: environment variables of the process.
        answer: answers the worker's requests, see PeerConnection.

    Raises:
        OSError: the process could not be started.

    Attributes:
        ready: whether the worker takes requests, with the same models as the others.
        stale: whether the worker's models differ from the others', so that it ends and its replacement loads theirs.
        ready_since: ``time.monotonic()`` when the worker became ready.
        fault: the reason why the supervisor killed the worker, or None.
    """

    def __init__(
        self,
        slot: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        answer: Callable[[str, dict[str, Any]], Any],
    ) -> None:
        ours, theirs = Pipe()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    list(command),
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone, which drains the workers
                )
            except BaseException:
                ours.close()
                raise
        self.slot = slot
        self.ready = self.stale = False
        self.ready_since = 0.0
        self.fault: str | None = None
        self.connection = PeerConnection(ours, answer)
        self._lock = threading.Lock()  # guards the attributes below
        self._beat: Future[Any] | None = None
        self._status: Status | None = None
        self._unanswered_s = self._event_s = 0.0

    @property
    def name(self) -> str:
        """The worker's name in messages."""
        return f"worker {self.slot} (process {self.process.pid})"

    def first_line(self) -> dict[str, Any]:
        """The first JSON object that the worker prints: its address or its error; empty if the worker ends without one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return {}

    def wait(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        assert self.process.stdout is not None
        with self.process.stdout as stray:
            for _ in stray:  # a full pipe would block the process
                pass
        code = self.process.wait()
        self.connection.join(_LAST_WORDS_S)
        return code

    def beat(self) -> Future[Any]:
        """Request the worker's status from its event loop, unless the last request is still unanswered."""
        with self._lock:
            if self._beat is None or self._beat.done():
                self._read_beat()
                self._beat = self.connection.request("beat")
            return self._beat

    def silent_s(self, passed_s: float) -> float:
        """Seconds for which the worker's event loop has not answered or its gRPC thread has been at one event, the larger.

        Args:
            passed_s: seconds to count as waited since the last call.
        """
        with self._lock:
            self._read_beat()
            if self._beat is not None and not self._beat.done():
                self._unanswered_s += passed_s
            return max(self._unanswered_s, self._event_s)

    def status(self) -> Status | None:
        """The last status that the worker sent; None before the first."""
        with self._lock:
            self._read_beat()
            return self._status

    def kill(self, fault: str) -> None:
        """Kill the process; ``fault`` is the reason."""
        self.fault = fault
        self.process.kill()

    def end_reason(self, code: int) -> str:
        """A description, for messages, of how the process ended with exit code ``code``."""
        return self.fault or _reason(code)

    def _read_beat(self) -> None:
        if self._beat is None or not self._beat.done():
            return
        self._unanswered_s = 0.0
        if self._beat.exception() is None:
            answer = self._beat.result()
            self._status, self._event_s = answer["status"], answer["event_s"]


def _reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGBUS:
        return (
            "was killed by SIGBUS: a file that it maps may have been truncated, or its disk may fail; look at the archives "
            "with `recinfer verify`, and put back what is damaged"
        )
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
