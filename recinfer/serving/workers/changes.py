"""Changes of models by admin calls: each change is made in all workers or in none."""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving.engine.change_log import log_change, log_refused
from recinfer.serving.engine.state import ServedState
from recinfer.serving.wire.admin_verbs import VERBS
from recinfer.serving.workers.connection import MadeChange
from recinfer.serving.workers.process import WorkerProcess
from recinfer.strict_json import build

__all__ = ["ModelChanges"]

_ANSWER_S = 5.0  # for each worker's heartbeat before a change
_CHANGE_S = 3600.0  # loading reads and checks a whole archive


@dataclass(frozen=True)
class _Outcome:
    """The results of a call in several workers; a worker that died meanwhile is in neither list."""

    made: list[tuple[WorkerProcess, MadeChange]]
    failed: list[tuple[WorkerProcess, RecinferError]]


class ModelChanges:
    """Makes the changes of models one after another, on its own thread.

    Args:
        workers: returns the workers that are ready now.
        report: called with a line of text for each worker that must be replaced.

    Attributes:
        lock: held while a change is made. Hold it to read ``state`` and ``generation`` and to mark a worker as ready.
        state: the models that a replacement worker loads; None: the models that its command names.
        generation: number of changes made.
    """

    def __init__(self, workers: Callable[[], list[WorkerProcess]], report: Callable[[str], None]) -> None:
        self._workers = workers
        self._report = report
        self.lock = threading.Lock()
        self.state: ServedState | None = None
        self.generation = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recinfer-change")

    def submit(self, call: str, data: str) -> Future[str]:
        """Queue the admin call ``call`` with its request in base64; the Future gives the answer in base64."""
        return self._thread.submit(self._make_and_log, call, data)

    def close(self) -> None:
        """Drop the queued changes and accept no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_and_log(self, call: str, data: str) -> str:
        request = base64.b64decode(data)
        try:
            answer = self._make_in_all(call, data)
        except Exception as error:
            log_refused(call, request, error)
            raise
        log_change(call, request)
        return answer

    def _make_in_all(self, call: str, data: str) -> str:
        with self.lock:
            workers = [worker for worker in self._workers() if not worker.stale]
            _check_all_answer(workers)
            outcome = _request_all(workers, call, data)
            failed = list(outcome.failed)
            if failed and (_undo(call) is not None or not outcome.made):
                self._end_workers(_take_back(outcome, call, data))
                raise failed[0][1]
            self._end_workers(failed)  # this call cannot be undone in the workers that made it
            if not outcome.made:
                raise UnavailableError("no worker is there to make the change; try again")
            answer = outcome.made[0][1]
            self.state = answer.state
            self.generation += 1
            return answer.answer

    def _end_workers(self, failed: Sequence[tuple[WorkerProcess, RecinferError]]) -> None:
        """End the workers whose models differ from the others'; their replacements load the others' models."""
        for worker, error in failed:
            self._report(f"{worker.name} could not make a change and ends: {error}")
            worker.stale = True
            worker.process.terminate()


def _check_all_answer(workers: Sequence[WorkerProcess]) -> None:
    """Raise UnavailableError if a worker does not answer; the message names the silent workers."""
    beats = [(worker, worker.beat()) for worker in workers]
    wait([beat for _, beat in beats], timeout=_ANSWER_S)
    silent = [worker.name for worker, beat in beats if not beat.done()]
    if silent:
        do = "do" if len(silent) > 1 else "does"
        raise UnavailableError(
            f"{' and '.join(silent)} {do} not answer; the change was not made. A worker that goes on like that is "
            "replaced (--worker-timeout): try again then"
        )


def _undo(call: str) -> str | None:
    """The verb that takes ``call`` back, see recinfer.serving.wire.admin_verbs.Verb."""
    return VERBS[call].undo if call in VERBS else None


def _take_back(outcome: _Outcome, call: str, data: str) -> list[tuple[WorkerProcess, RecinferError]]:
    """Undo a change in the workers that made it; returns the workers that could not.

    The weights are restored first: a version with a weight is not unloaded. The caller gets its error afterwards, so its next
    request finds the old weights.
    """
    restored = []
    for worker, change in outcome.made:
        spreads = {model: dataclasses.asdict(spread) for model, spread in change.before.items()}
        restored.append((worker, worker.connection.request("set_spreads", spreads=spreads)))
    failed = _results(restored)[1]
    opposite = _undo(call)
    if not opposite:
        return failed
    # Loading a version that a worker already served changed nothing: the worker keeps the version.
    made = [worker for worker, change in outcome.made if not change.served_before]
    return failed + [found for found in _request_all(made, opposite, data).failed if found[0] not in dict(failed)]


def _request_all(workers: Sequence[WorkerProcess], call: str, data: str) -> _Outcome:
    asked = [(worker, worker.connection.request("admin", call=call, data=data)) for worker in workers]
    made, failed = _results(asked)
    return _Outcome([(worker, build(MadeChange, answer, "a worker's answer")) for worker, answer in made], failed)


def _results(
    futures: Sequence[tuple[WorkerProcess, Future[Any]]],
) -> tuple[list[tuple[WorkerProcess, Any]], list[tuple[WorkerProcess, RecinferError]]]:
    """Wait for the answers to a request, and return the answers and the errors.

    The supervisor kills a worker that hangs, so the Future of each worker ends.
    """
    wait([future for _, future in futures], timeout=_CHANGE_S)
    answered, failed = [], list[tuple[WorkerProcess, RecinferError]]()
    for worker, future in futures:
        if not future.done():
            failed.append((worker, UnavailableError(f"{worker.name} gave no answer within {_CHANGE_S:g} s")))
        elif (error := future.exception()) is None:
            answered.append((worker, future.result()))
        elif isinstance(error, RecinferError) and not worker.connection.closed:
            failed.append((worker, error))
    return answered, failed
