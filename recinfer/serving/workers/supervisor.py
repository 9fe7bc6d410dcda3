"""Several serving processes on one port: started, watched, restarted when one dies, drained together at the end.

The supervisor loads no model and takes no traffic. It holds the port (bound, not listening), so that the workers can
share it (SO_REUSEPORT) and nobody else takes it between two of them. Over a pipe to each worker it learns what they
counted, and has a change of models made in all of them or in none.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from recinfer import env
from recinfer.errors import ConfigError, RecinferError, UnavailableError
from recinfer.serving.server.address import hold_address
from recinfer.serving.server.telemetry.metrics import Status, merge_statuses, only_counts
from recinfer.serving.workers.pipe import Pipe

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0
_STEADY_S = 10.0  # a worker that served this long starts again at once
_POLL_S = 0.05
_LOOK_S = 2.0  # how much of a killed worker's counts may be lost
_STATUS_S = 1.0  # a worker that does not say how it is within that is shown as it was
_CHANGE_S = 3600.0  # loading reads and checks a whole archive
# What takes back a change that some workers made and another could not, beside the weights that each of them had before.
# The requests begin with the same fields, so that a change's own request serves to take it back.
_OPPOSITE = {"Load": "Unload", "SetDefault": None, "SetWeights": None, "Rollback": None, "ApplyDelta": "UndoDelta"}


class _Worker:
    """One running worker process."""

    def __init__(self, process: subprocess.Popen[str], answer: Callable[[str, dict[str, Any]], Any]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.pipe = Pipe(process.stdout, process.stdin, answer)
        self.ready = self.stale = False
        self.since = 0.0  # time.monotonic() when it was ready
        self.last: Status | None = None
        self.asked: Future[Any] | None = None

    def look(self) -> Future[Any]:
        """Ask for its status, unless it has not answered the last time yet."""
        if self.asked is None or self.asked.done():
            self.asked = self.pipe.ask("status")
        return self.asked

    def seen(self) -> Status | None:
        """The status that it gave last."""
        if self.asked is not None and self.asked.done() and self.asked.exception() is None:
            self.last = self.asked.result() or self.last
        return self.last


class Supervisor:
    """Keeps ``workers`` processes serving one port.

    Args:
        command: port -> the command of one worker. It serves that port with SO_REUSEPORT, reads one line of JSON from
            stdin before it loads its models (see recinfer.serving.workers.worker), prints one to stdout when it takes requests,
            speaks as recinfer.serving.workers.pipe says from then on, and drains when its stdin ends or on SIGTERM.
        workers: how many.
        host, port: where; port 0 takes a free one.
        grace: seconds a worker has to drain.
        tell: gets one line of text for each worker that died or came back.
        one_first: start the others when the first serves, with its models: where what a worker loads depends on when
            it looks (the newest versions of a model store).
        environment: of the workers; None: this process's. Here they are told that they are workers (see recinfer.env):
            whatever ``command`` makes of its arguments, no worker becomes a supervisor.
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
        self._command, self._host, self._grace, self._tell = command, host, grace, tell
        self._one_first, self._environment = one_first, env.supervised_environment(environment)
        # Set by signal handlers too, so it is no Event: see recinfer.serving.server.server.serve.
        self._stopping = False
        self._lock = threading.Lock()
        self._workers: dict[int, _Worker] = {}
        self._started = time.monotonic()
        self._shown = False
        self._ended: Status | None = None  # the counts of workers that are gone
        self._state: dict[str, Any] | None = None  # the models that a worker in the place of another begins with
        self._generation = 0  # of the state
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="recinfer-change")
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
            on_ready: called once, when all workers take requests, with what the first said.

        Raises:
            UnavailableError: a worker ended before it was ever ready: the same would happen to its successor.
        """
        slots = [threading.Thread(target=self._keep, args=(slot,), daemon=True) for slot in range(len(self._ready))]
        try:
            for slot, thread in enumerate(slots):
                thread.start()
                if slot == 0 and self._one_first:
                    self._wait_for(self._ready[0])
            for ready in self._ready:
                self._wait_for(ready)
            if not self._stopping and on_ready is not None:
                on_ready(self._answer)
            self._watch()
        finally:
            self.stop()
            self._send_all(signal.SIGTERM)
            end = time.monotonic() + self._grace + 5.0
            for thread in slots:
                if thread.ident is not None:
                    thread.join(max(0.0, end - time.monotonic()))
            self._send_all(signal.SIGKILL)
            self._changes.shutdown(wait=False, cancel_futures=True)
            self._socket.close()
        if self._failed is not None:
            raise UnavailableError(self._failed)

    def stop(self) -> None:
        """Have ``run`` drain and end all workers; takes no lock, so a signal handler may call it."""
        self._stopping = True

    def status(self) -> Status:
        """The sum of what all workers counted, those that are gone too (see recinfer.serving.server.telemetry.metrics).

        A worker that was killed has told its counts when it was last asked; what it counted after that is lost.
        """
        self._shown = True
        workers = [worker for worker in self._running() if worker.ready]
        wait([worker.look() for worker in workers], timeout=_STATUS_S)
        with self._lock:
            ended = [] if self._ended is None else [self._ended]
            # Under the lock, since a worker that ends meanwhile is counted either here or there.
            still = [worker.seen() for worker in self._workers.values() if worker in workers]
        merged = merge_statuses([status for status in still if status is not None], ended)
        return merged | {"uptime": time.monotonic() - self._started}

    def _watch(self) -> None:
        """Until the end; once somebody has asked for the status, the workers are looked at every now and then."""
        looked = time.monotonic()
        while not self._stopping:
            time.sleep(_POLL_S)
            if self._shown and time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                for worker in self._running():
                    if worker.ready:
                        worker.seen()
                        worker.look()

    def _running(self) -> list[_Worker]:
        with self._lock:
            return list(self._workers.values())

    def _wait_for(self, ready: threading.Event) -> None:
        while not ready.is_set() and not self._stopping:
            time.sleep(_POLL_S)

    def _send_all(self, number: signal.Signals) -> None:
        for worker in self._running():
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def _keep(self, slot: int) -> None:
        """Run one worker after another in ``slot`` until the end."""
        pause = 0.0
        while not self._paused(pause):
            started = time.monotonic()
            process = subprocess.Popen(
                list(self._command(self.port)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches us alone, and we drain them
            )
            worker = _Worker(process, self._asked)
            with self._lock:
                self._workers[slot] = worker
            if self._stopping:
                process.terminate()
            said = self._begin(worker, slot)
            worker.pipe.run()
            code = process.wait()
            with self._lock:
                self._workers.pop(slot, None)
                if (last := worker.seen()) is not None:
                    self._ended = merge_statuses([], [only_counts(last), *([self._ended] if self._ended else [])])
            for stream in (process.stdout, process.stdin):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            if self._stopping:
                return
            if worker.stale:
                continue
            why = f"worker {slot} (process {process.pid}) {_reason(code)}"
            if not self._ready[slot].is_set():
                self._failed = f"{why} before it was ready{said}"
                self.stop()
                return
            # Not how long it lived: one that fails after a long load would be started again and again at once.
            steady = worker.ready and time.monotonic() - worker.since > _STEADY_S
            pause = 0.0 if steady else min(_MAX_BACKOFF_S, max(_BACKOFF_S, 2 * pause))
            lived = time.monotonic() - started
            self._tell(f"{why} after {lived:.1f} s{said}; the others serve, another starts in {pause:g} s")

    def _paused(self, seconds: float) -> bool:
        """Wait for ``seconds``; whether it ends meanwhile."""
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left))
        return self._stopping

    def _begin(self, worker: _Worker, slot: int) -> str:
        """Tell the worker what to begin with, read its line; returns what went wrong, as text to put behind a message."""
        process = worker.process
        assert process.stdin is not None and process.stdout is not None
        with self._lock:
            state, generation = self._state, self._generation
        with suppress(OSError):  # it has ended already, and its line says why
            process.stdin.write(json.dumps({"restore": state}) + "\n")
            process.stdin.flush()
        answer = _first_object(process.stdout)
        if "port" not in answer:
            return f": {answer['error']['message']}" if "error" in answer else ""
        with self._lock:
            worker.stale = self._generation != generation
            worker.ready, worker.since = not worker.stale, time.monotonic()
        if worker.stale:  # the models were changed while it loaded the old ones
            process.terminate()
            return ""
        if state is None:
            worker.pipe.ask("state").add_done_callback(self._remember)
        if self._ready[slot].is_set():
            self._tell(f"worker {slot} serves again (process {process.pid})")
        self._answer = self._answer or answer
        self._ready[slot].set()
        return ""

    def _remember(self, state: Future[Any]) -> None:
        """Keep what the first worker began with."""
        with self._lock:
            if self._state is None and state.exception() is None:
                self._state = state.result()

    # -- changes of models -------------------------------------------------------------------------------------------

    def _asked(self, what: str, arguments: dict[str, Any]) -> Future[str]:
        """A worker got an admin call: one after another, they are made everywhere."""
        assert what == "change", what
        return self._changes.submit(self._change, arguments["call"], arguments["data"])

    def _change(self, call: str, data: str) -> str:
        with self._lock:  # a worker that is not ready now finds the generation changed when it is
            workers = [worker for worker in self._workers.values() if worker.ready]
            self._generation += call != "ListModels"
        if call == "ListModels":
            workers = workers[:1]
        made, failed = _in_all(workers, call, data)
        if failed and (call in _OPPOSITE or not made):
            _take_back(made, call, data)
            raise failed[0][1]
        for worker, error in failed:  # there is no way back: it begins anew, with what the others have
            self._tell(f"process {worker.process.pid} could not make a change and ends: {error}")
            worker.process.terminate()
        if not made:
            raise UnavailableError("no worker is there to make the change; try again")
        if call != "ListModels":
            for worker, _ in made:
                state = worker.pipe.ask("state")
                wait([state], timeout=_STATUS_S)
                if state.done() and state.exception() is None:
                    with self._lock:
                        self._state = state.result()
                    break
        answer: str = made[0][1]["answer"]
        return answer


def _first_object(lines: Iterable[str]) -> dict[str, Any]:
    """The first line that is a JSON object, past whatever else is printed; empty when there is none."""
    for line in lines:
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _take_back(made: Sequence[tuple[_Worker, dict[str, Any]]], call: str, data: str) -> None:
    """Have those who made a change be as they were: the weights first, since what has one is not unloaded."""
    wait([worker.pipe.ask("set_spread", spread=said["before"]) for worker, said in made], timeout=_STATUS_S)
    if (opposite := _OPPOSITE.get(call)) is not None:
        _in_all([worker for worker, _ in made], opposite, data)


def _in_all(
    workers: Sequence[_Worker], call: str, data: str
) -> tuple[list[tuple[_Worker, dict[str, Any]]], list[tuple[_Worker, RecinferError]]]:
    """Who made the change, with what it said, and who could not, with the error; one that dies meanwhile is neither."""
    asked = [(worker, worker.pipe.ask("admin", call=call, data=data)) for worker in workers]
    wait([future for _, future in asked], timeout=_CHANGE_S)
    made: list[tuple[_Worker, dict[str, Any]]] = []
    failed: list[tuple[_Worker, RecinferError]] = []
    for worker, future in asked:
        error = future.exception() if future.done() else UnavailableError(f"no answer within {_CHANGE_S:g} s")
        if error is None:
            made.append((worker, future.result()))
        elif isinstance(error, RecinferError) and worker.process.poll() is None:
            failed.append((worker, error))
    return made, failed


def _reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
