"""Several serving processes on one port: started, watched, replaced when one dies or hangs, drained together at the end.

The supervisor loads no model and takes no traffic. It holds the port (bound, not listening), so that the workers can
share it (SO_REUSEPORT) and no other process takes it between two of them. Over a connection to each worker, the
supervisor reads the worker's status and counts at an interval, and makes a change of models in all workers or in none.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from recinfer import env
from recinfer.errors import ConfigError, UnavailableError
from recinfer.serving.engine.state import ServedState
from recinfer.serving.server.telemetry.metrics import Status, merge_statuses, sum_ended
from recinfer.serving.wire.address import hold_address
from recinfer.serving.workers.changes import ModelChanges
from recinfer.serving.workers.process import WorkerProcess
from recinfer.strict_json import build

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
_ALONE_BACKOFF_S = 0.5  # where no other worker runs
_ALONE = "no other one runs"
_STEADY_S = 10.0  # a worker that served this long starts again at once
_POLL_S = 0.05
_BEATS = 10  # status requests per timeout
_MAX_INTERVAL_S = 1.0  # between two of them: a killed worker's counts since its last answer are lost
_STATUS_S = 1.0  # a worker whose status takes longer is shown with its last status
_STOP_SLACK_S = 5.0  # for a worker to end, after its grace period
_KILLED_S = 5.0  # for a killed worker to end
_FIRST_STARTS = 3  # starts that a signal may end, before a worker was ever ready


@dataclasses.dataclass(frozen=True)
class _End:
    """How a worker ended and what the others do, for messages; and whether it had served for long, had other models than
    the others, or was ended by a signal."""

    said: str
    others: str
    steady: bool = False
    stale: bool = False
    killed: bool = False


class Supervisor:
    """Keeps ``workers`` processes serving one port.

    Args:
        command: port -> the command of one worker, which serves that port with SO_REUSEPORT. Its stdin is a connection (see
            recinfer.serving.workers.worker), whose first message has the models to load. The worker prints one line of JSON to
            stdout when it takes requests, and drains when the connection ends or on SIGTERM.
        workers: number of worker processes.
        host, port: the address to serve; port 0 takes a free port.
        grace: seconds a worker has to drain.
        timeout: seconds; a worker that takes requests and whose event loop has not answered for that long, or whose
            gRPC thread has been at one event for that long, is killed and replaced.
        report: called with one line of text for each worker that died or came back.
        one_first: start the other workers when the first serves, with its models: for a model store, whose newest versions
            depend on when a worker reads the folder.
        environment: environment variables of the workers; None: those of this process. A variable that marks them as workers
            is added (see recinfer.env), so that no worker becomes a supervisor, whatever ``command`` runs.

    Attributes:
        changes: changes of models; its ``submit`` makes a change in all workers.

    Raises:
        ConfigError: no workers, no timeout, or this process is a worker itself.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        workers: int,
        host: str,
        port: int,
        *,
        grace: float = 10.0,
        timeout: float = 10.0,
        report: Callable[[str], None] = _log.warning,
        one_first: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if env.supervised():
            raise ConfigError(
                "workers: this process is a worker of another supervisor (RECINFER_SUPERVISED is set) and starts none "
                "itself; unset it where you start a server of its own"
            )
        if workers < 1:
            raise ConfigError(f"workers: got {workers}, expected at least 1")
        if not timeout > 0:
            raise ConfigError(f"timeout: got {timeout}, expected seconds above 0")
        self._command = command
        self._host = host
        self._grace = grace
        self._report = report
        self._timeout = timeout
        self._interval = min(_MAX_INTERVAL_S, timeout / _BEATS)
        self._one_first = one_first
        self._environment = env.supervised_environment(environment)
        # Set by signal handlers too, so they are no Events: see recinfer.serving.server.run.serve.
        self._stopping = self._hung_up = False
        self._lock = threading.Lock()  # guards the next three attributes
        self._workers: dict[int, WorkerProcess] = {}
        self._started_slots: set[int] = set()  # slots whose workers run, or are about to be started
        self._ended: Status | None = None  # the summed counts of ended workers
        self._began = time.monotonic()
        self.changes = ModelChanges(self._ready_workers, report)
        self._ready = [threading.Event() for _ in range(workers)]
        self._failed: str | None = None
        self._answer: dict[str, Any] = {}
        self._socket = hold_address(host, port)
        self.port: int = self._socket.getsockname()[1]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._running() if worker.process.poll() is None]

    def run(self, on_ready: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Serve until ``stop``.

        Args:
            on_ready: called once, when all workers take requests, with the JSON line of the first ready worker.

        Raises:
            UnavailableError: a worker ended by itself before it was ever ready, as its replacement would, or a signal ended
                it and its next ones before they were ready.
        """
        slots = [threading.Thread(target=self._keep, args=(slot,), daemon=True) for slot in range(len(self._ready))]
        try:
            for slot, thread in enumerate(slots):
                thread.start()
                if slot == 0 and self._one_first:
                    self._watch(until=self._ready[:1])
            self._watch(until=self._ready)
            if not self._stopping and on_ready is not None:
                on_ready(self._answer)
            self._watch()
        finally:
            self.stop()
            self._send_all(signal.SIGTERM)
            _join(slots, self._grace + _STOP_SLACK_S)
            self._send_all(signal.SIGKILL)  # workers that hang, or are stopped
            _join(slots, _KILLED_S)
            self.changes.close()
            self._socket.close()
        if self._failed is not None:
            raise UnavailableError(self._failed)

    def stop(self) -> None:
        """Have ``run`` drain and end all workers; takes no lock, so a signal handler may call it."""
        self._stopping = True

    def hang_up(self) -> None:
        """Send SIGHUP to the serving workers, soon; starting workers read their files later anyway. Takes no lock."""
        self._hung_up = True

    def status(self) -> Status:
        """The sum of all workers' counts, also of ended ones (see recinfer.serving.server.telemetry.metrics).

        A killed worker's counts are those of its last answer; its later counts are lost.
        """
        workers = self._ready_workers()
        wait([worker.beat() for worker in workers], timeout=_STATUS_S)
        with self._lock:
            ended = [] if self._ended is None else [self._ended]
            # Under the lock, so that a worker that ends meanwhile is counted exactly once.
            still = [worker.status() for worker in self._workers.values() if worker in workers]
        merged = merge_statuses([status for status in still if status is not None], ended)
        return merged | {"uptime": time.monotonic() - self._began}

    def _watch(self, until: Sequence[threading.Event] | None = None) -> None:
        """Kill hanging workers until all events of ``until`` are set or ``stop`` is called."""
        looked = time.monotonic()
        while not self._stopping and (until is None or not all(event.is_set() for event in until)):
            time.sleep(min(_POLL_S, self._interval))
            if self._hung_up:
                self._hung_up = False
                self._send(signal.SIGHUP, self._ready_workers())
            passed = time.monotonic() - looked
            if passed < self._interval:
                continue
            looked += passed
            for worker in self._ready_workers():
                # If this process itself was stopped, answers that arrived meanwhile are still unread: count two
                # intervals at most.
                if worker.silent_s(min(passed, 2 * self._interval)) > self._timeout:
                    worker.kill(f"hung (no answer for {self._timeout:g} s) and was killed")
                worker.beat()

    def _running(self) -> list[WorkerProcess]:
        with self._lock:
            return [self._workers[slot] for slot in sorted(self._workers)]

    def _ready_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self._running() if worker.ready]

    def _send_all(self, number: signal.Signals) -> None:
        self._send(number, self._running())

    def _send(self, number: signal.Signals, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def _keep(self, slot: int) -> None:
        """Run a worker in ``slot``, and its replacements, until ``stop`` is called."""
        pause, kills = 0.0, 0
        while self._may_start(slot, pause):
            began = time.monotonic()
            try:
                worker = WorkerProcess(slot, self._command(self.port), self._environment, self._on_request)
            except OSError as error:
                with self._lock:
                    end = _End(f"worker {slot} could not be started: {error}", self._without(slot))
            else:
                end = self._run(worker, began)
            if self._stopping:
                return
            if end.stale:
                continue
            if not self._ready[slot].is_set():
                kills += end.killed
                if not end.killed or kills == _FIRST_STARTS:
                    self._failed = end.said + (f", as were the {kills - 1} before it" if end.killed else "")
                    self.stop()
                    return
            pause = 0.0 if end.steady else min(_MAX_BACKOFF_S, max(_BACKOFF_S, 2 * pause))
            waits = min(pause, _ALONE_BACKOFF_S) if end.others == _ALONE else pause
            self._report(f"{end.said}; {end.others}, another starts in {waits:g} s")

    def _run(self, worker: WorkerProcess, began: float) -> _End:
        """Let ``worker`` serve until it ends; returns how it ended."""
        with self._lock:
            self._workers[worker.slot] = worker
        if self._stopping:
            worker.process.terminate()
        error = self._begin(worker)
        code = worker.wait()
        with self._lock:
            others = self._without(worker.slot)
            if (last := worker.status()) is not None:
                self._ended = sum_ended(last, self._ended)
        when = f"after {time.monotonic() - began:.1f} s" if self._ready[worker.slot].is_set() else "before it was ready"
        # Counted from when the worker was ready: a worker that fails after a long load would else restart at once, again
        # and again.
        steady = worker.ready and time.monotonic() - worker.ready_since > _STEADY_S
        said = f"{worker.name} {worker.end_reason(code)} {when}{error}"
        return _End(said, others, steady, worker.stale, killed=code < 0)

    def _without(self, slot: int) -> str:
        """Take a worker that has ended out of the running ones; returns what the others do, for messages. Call with the lock."""
        self._workers.pop(slot, None)
        self._started_slots.discard(slot)
        if not self._started_slots:
            return _ALONE
        return (
            "the others go on" if any(worker.ready for worker in self._workers.values()) else "no other one serves yet"
        )

    def _may_start(self, slot: int, pause: float) -> bool:
        """Wait for ``pause`` seconds, less where no other worker runs; returns False if ``stop`` is called meanwhile."""
        began = time.monotonic()
        while not self._stopping:
            waited = time.monotonic() - began
            with self._lock:
                if waited >= pause or (waited >= _ALONE_BACKOFF_S and not self._started_slots):
                    self._started_slots.add(slot)
                    return True
            time.sleep(min(_POLL_S, pause - waited))
        return False

    def _begin(self, worker: WorkerProcess) -> str:
        """Send the worker the state to begin with and read its line; returns its error as the end of a message, or ""."""
        changes = self.changes
        with changes.lock:
            state, generation = changes.state, changes.generation
        worker.connection.request("begin", restore=None if state is None else dataclasses.asdict(state))
        answer = worker.first_line()
        if "port" not in answer:
            return f": {answer['error']['message']}" if "error" in answer else ""
        with changes.lock:
            worker.stale = changes.generation != generation
            if worker.stale:  # the models were changed while it loaded the old ones
                worker.process.terminate()
                return ""
            if changes.state is None:
                changes.state = _state_of(worker, self._timeout)
            worker.ready_since, worker.ready = time.monotonic(), True
        if self._ready[worker.slot].is_set():
            self._report(f"worker {worker.slot} serves again (process {worker.process.pid})")
        self._answer = self._answer or answer
        self._ready[worker.slot].set()
        return ""

    def _on_request(self, what: str, arguments: dict[str, Any]) -> Future[str]:
        """Queue an admin call that changes models, for the worker that got it."""
        assert what == "change", what
        return self.changes.submit(arguments["call"], arguments["data"])


def _state_of(worker: WorkerProcess, seconds: float) -> ServedState | None:
    """The models that ``worker`` began with; None if it does not answer."""
    future = worker.connection.request("state")
    wait([future], timeout=seconds)
    if not future.done() or future.exception() is not None:
        return None
    return build(ServedState, future.result(), "state")


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Wait for the started threads, for ``seconds`` in all."""
    end = time.monotonic() + seconds
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
