"""Chooses the path on which a request is answered; the paths are the same for every protocol.

1. A small plain lookup in tables of this process: answered from its bytes, now.
2. A plain prediction: from its bytes, in a short run that it shares with others that are ready.
3. A plain prediction whose run is long: on a worker thread.
4. A large plain prediction that is the only request: in parts, on several threads.
5. A plain request of a ranker: split here, looked up on shard servers, joined; the dense part then runs as in 2 to 4.
6. Any other request: decoded and run on a worker thread; a ranker's request waits for shard servers without a thread.

Paths 1 to 4 are here. A request that turns out to be unusual (an id out of range, a number that is not finite, a dense part that
fails) is passed to the decoded path, which has the error messages. Both paths must give the same answers; tests compare them
byte by byte.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from recinfer.inference.byte_tables import AwaitedLookup, ReadyLookup
from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.decoded_path import DecodedRuns, InferenceService
from recinfer.serving.engine.memory_budget import UNCOUNTED, Ticket
from recinfer.serving.engine.registry import RequestStats, RunCost
from recinfer.serving.engine.remote_byte_path import FanOuts
from recinfer.serving.engine.request import CallName, Fill, PlainReader, PlainRequest, Request, trace_of_task
from recinfer.serving.engine.scheduler import Entry, Scheduler
from recinfer.serving.wire.arrays import Buffer, output_head, predict_head
from recinfer.serving.wire.limits import BatchConfig

__all__ = ["Dispatcher", "LoopCaller", "ParallelParts", "Predictions"]

T = TypeVar("T")

_FLOAT_BYTES = 4
_FEW_BYTES = 64 << 10
# A larger lookup would block the thread, and other requests would wait.
_MOST_BYTES, _MOST_IDS, _MOST_FLOATS = 128 << 10, 8192, 1 << 18
_LONGEST_RUN_S = 50e-3  # longest merged run: later requests still meet their deadlines, and longer runs gain nothing
_OTHER_SHARE = 0.8  # part of a request for each thread other than the caller's, relative to equal parts


class Dispatcher:
    """Answers lookups and predictions. Any thread may call.

    Args:
        service: decodes, runs and encodes requests.
        batching: bounds of the queue and of merged runs.
        threads: number of worker threads for long runs.
        at_a_time: number of runs or fan-outs that may be under way together; None: ``threads``.

    Attributes:
        scheduler: queued requests and their runs.
    """

    def __init__(
        self, service: InferenceService, batching: BatchConfig, threads: int, at_a_time: int | None = None
    ) -> None:
        stats = service.stats
        self._stats = stats
        self._reader = PlainReader(service.registry, service.limits)
        self.scheduler = Scheduler(
            batching, threads, at_a_time, waited=lambda seconds: stats.stages.add("queue", seconds)
        )
        self._decoded = DecodedRuns(service, self.scheduler)
        self._predictions = Predictions(self.scheduler, stats, self._decoded.submit, threads)
        self._fan_outs = FanOuts(self.scheduler, self._predictions.submit, stats, self._decoded.submit)

    def close(self) -> None:
        """End the threads; call this after the last request."""
        self.scheduler.close()
        self._predictions.close()

    def dispatch(self, request: Request) -> None:
        """Answer or queue ``request``; errors are replied. The caller calls ``scheduler.run_ready`` after its last one."""
        try:
            self._dispatch(request)
        except Exception as error:
            request.reply(error)

    def _dispatch(self, request: Request) -> None:
        scheduler = self.scheduler
        scheduler.check_deadline(request.deadline)
        start = time.perf_counter()
        plain = self._reader.read(request.data)
        if plain is not None:
            request.served = plain.model
            self._stats.stages.add("decode", time.perf_counter() - start)
            if isinstance(plain.order, AwaitedLookup):
                _count_vectors(request, plain)
                self._fan_outs.start(request, plain)
                return
            if request.call == "Predict":
                if plain.can_predict():
                    scheduler.queue.admit(request.deadline)
                    _count_vectors(request, plain)
                    self._predictions.submit(request, plain, plain.fill)
                    return
            elif (answer := lookup_now(plain, self._stats)) is not None:
                scheduler.count(1, plain.batch)
                request.reply(answer)
                return
        scheduler.queue.admit(request.deadline)
        self._decoded.submit(request)

    def answer_all(self, requests: Sequence[tuple[CallName, bytes]], deadline: float) -> list[bytes | Exception]:
        """Answer requests that arrived together, on a thread that may wait; the requests share runs where possible."""
        answers: list[Any] = [None] * len(requests)
        done = threading.Semaphore(0)

        def reply(at: int, answer: bytes | Exception) -> None:
            answers[at] = answer
            done.release()

        for at, (call, data) in enumerate(requests):
            self.dispatch(Request(call, data, deadline, functools.partial(reply, at)))
        self.scheduler.run_ready()
        for _ in requests:
            done.acquire()
        return answers


def _count_vectors(request: Request, plain: PlainRequest) -> None:
    """Count the vectors in the request's ticket unless they are small, as small vectors live shortly and few at a time."""
    num_bytes = plain.batch * plain.order.columns * _FLOAT_BYTES
    if num_bytes > _FEW_BYTES:
        request.ticket.grow_to_answer(num_bytes)


class LoopCaller:
    """Dispatches requests for coroutines of one event loop, the running one.

    Args:
        dispatcher: answers the requests.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()
        self._ends = False  # whether a callback is scheduled for the end of this turn of the loop

    async def answer(self, call: CallName, data: bytes, deadline: float, ticket: Ticket = UNCOUNTED) -> bytes:
        """The serialized answer to a request; raises the request's error. A cancelled request frees its place in the queue."""
        future: asyncio.Future[bytes] = self._loop.create_future()

        def reply(answer: bytes | Exception) -> None:
            if threading.get_ident() == thread:
                _settle(future, answer)
            else:
                self._loop.call_soon_threadsafe(_settle, future, answer)

        thread = threading.get_ident()
        request = Request(call, data, deadline, reply, ticket=ticket, trace=trace_of_task.get())
        self._dispatcher.dispatch(request)
        if self._dispatcher.scheduler.has_new and not self._ends:
            self._ends = True
            self._loop.call_soon(self._end_turn)
        try:
            return await future
        except asyncio.CancelledError:
            self._dispatcher.scheduler.forget(request)
            raise

    def _end_turn(self) -> None:
        self._ends = False
        self._dispatcher.scheduler.run_ready()


def _settle(future: asyncio.Future[bytes], answer: bytes | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def lookup_now(request: PlainRequest, stats: RequestStats) -> bytes | None:
    """The serialized answer to a small lookup in tables of this process; None when the decoded path has to answer."""
    if request.context is not None:  # a LookupRequest has no context
        return None
    if (
        len(request.data) > _MOST_BYTES
        or request.bags.ids > _MOST_IDS
        or request.batch * request.order.columns > _MOST_FLOATS
    ):
        return None
    start = time.perf_counter()
    assert isinstance(request.order, ReadyLookup)
    answer = request.order.after(request.head(), request.bag_data, request.bags)
    if answer is None:
        return None
    stats.batch.add(request.batch)
    request.state.stages.add("lookup", time.perf_counter() - start)
    stats.stages.add("encode", 0.0)  # the lookup wrote the answer
    return answer


class _Prediction(NamedTuple):
    """A queued plain Predict.

    Attributes:
        fill: writes its vectors.
        since: ``time.perf_counter()`` when the lookup of its vectors began; None: the run looks them up.
        missing: ranks that gave no rows.
    """

    plain: PlainRequest
    fill: Fill
    since: float | None
    missing: tuple[int, ...]


class Predictions:
    """Runs plain predictions; predictions of one version of a model share runs. Any thread may submit a prediction.

    The scheduler calls the methods of recinfer.serving.engine.scheduler.Runner.

    Args:
        scheduler: queues the predictions.
        stats: the server's counts.
        decode: answers a request in the decoded path.
        threads: number of threads for the parts of one request.
    """

    def __init__(
        self, scheduler: Scheduler, stats: RequestStats, decode: Callable[[Request], None], threads: int
    ) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._decode = decode
        self._parts = ParallelParts(threads)

    def close(self) -> None:
        """End the threads; call this after the last request."""
        self._parts.close()

    def submit(
        self,
        request: Request,
        plain: PlainRequest,
        fill: Fill,
        since: float | None = None,
        missing: tuple[int, ...] = (),
    ) -> None:
        """Queue a prediction.

        Args:
            plain: the parts of the request; ``can_predict`` holds.
            fill: writes its vectors during the run.
            since: ``time.perf_counter()`` when the fan-out began; None: the tables are in this process.
            missing: ranks that gave no rows.
        """
        entry = Entry(request, plain.model.run_cost, plain.batch, _Prediction(plain, fill, since, missing))
        self._scheduler.submit(self, entry)

    # -- for the scheduler

    def can_start(self) -> bool:
        """True: only threads bound the number of runs."""
        return True

    def may_share(self, entry: Entry, samples: int) -> bool:
        """Whether the merged run is expected to take at most 50 ms, or twice the time of one sample where that is longer."""
        if not entry.work.plain.state.mergeable:
            return False
        cost: RunCost = entry.work.plain.model.run_cost
        return cost.expected(samples) <= max(_LONGEST_RUN_S, 2 * cost.expected(1))

    def seconds(self, entry: Entry, samples: int, threads: int) -> float:
        """The learned estimate; infinite for a version's first run, which a worker thread runs."""
        plain = entry.work.plain
        expected: float = plain.model.run_cost.expected(samples)
        if not expected:
            return math.inf
        return expected / plain.parts(threads) if samples == plain.batch else expected

    def run(self, entries: Sequence[Entry], threads: int) -> None:
        """Answer predictions of one version of a model."""
        begun, start = time.thread_time(), time.monotonic()
        cost: RunCost = entries[0].work.plain.model.run_cost
        elsewhere = 0.0
        answers: list[bytes | None]
        if len(entries) == 1 and entries[0].work.plain.parts(threads) > 1:
            answer, elsewhere = self._in_parts(entries[0].work, threads)
            answers = [answer]
        else:
            answers = self._run_merged([entry.work for entry in entries])
        answered = [entry.samples for entry, answer in zip(entries, answers) if answer is not None]
        if answered:
            cost.learn(sum(answered), time.thread_time() - begun + elsewhere)
            self._scheduler.count(len(answered), sum(answered))
            self._scheduler.queue.record_run(time.monotonic() - start, len(answered))
        for entry, answer in zip(entries, answers):
            if answer is None:
                self._decode(entry.request)
            else:
                self._stats.batch.add(entry.samples)
                entry.request.reply(answer)

    def _run_merged(self, works: Sequence[_Prediction]) -> list[bytes | None]:
        """Run predictions together; returns their serialized answers, None where the decoded path has to answer."""
        answers: list[bytes | None] = [None] * len(works)
        # A delta replaces a version's state: earlier requests run with the state that they were read with.
        for state in dict.fromkeys(work.plain.state for work in works):
            mine = [(at, work) for at, work in enumerate(works) if work.plain.state is state]
            self._run(state, mine, answers)
        return answers

    def _run(self, state: Predictor, works: Sequence[tuple[int, _Prediction]], answers: list[bytes | None]) -> None:
        start = time.perf_counter()
        columns = works[0][1].plain.order.columns
        pooled = np.empty((sum(work.plain.batch for _, work in works), columns), np.float32)
        dense, taken, end = [], [], 0
        for at, work in works:
            first, last = end, end + work.plain.batch
            values = work.plain.dense()
            if values is None or not work.fill(pooled[first:last], None):
                continue
            dense.append(values)
            taken.append((at, work, first, last))
            end = last
        if not taken:
            return
        arrays = [pooled[:end]]
        if state.num_dense:
            joined = dense[0] if len(dense) == 1 else np.concatenate(dense)
            arrays.insert(0, joined.reshape(end, state.num_dense))
        found = time.perf_counter()
        state.stages.add("lookup", found - (taken[0][1].since or start))
        outputs = _run_dense(state, arrays, end)
        if outputs is None:
            return
        start = time.perf_counter()
        odd = _has_nan(outputs)
        for at, work, first, last in taken:
            mine = outputs if len(taken) == 1 else [output[first:last] for output in outputs]
            if odd and _has_nan(mine):
                continue
            version = work.plain.model.version
            answers[at] = _encoded(state.output_names, mine, version, work.missing)
        self._stats.stages.add("encode", time.perf_counter() - start)

    def _in_parts(self, work: _Prediction, threads: int) -> tuple[bytes | None, float]:
        """Run a prediction that is the only queued request in parts of its samples, on several threads.

        Returns:
            The serialized answer, None if the decoded path has to answer; and the CPU seconds that threads other than the
            caller's spent.
        """
        plain = work.plain
        state, parts = plain.state, plain.parts(threads)
        start = time.perf_counter()

        def run(first: int, last: int) -> tuple[float, list[NDArray[Any]] | None]:
            pooled = np.empty((last - first, plain.order.columns), np.float32)
            if not work.fill(pooled, (first, last - first)) or (values := plain.dense(first, last)) is None:
                return 0.0, None
            arrays = [pooled]
            if state.num_dense:
                arrays.insert(0, values.reshape(last - first, state.num_dense))
            return time.perf_counter(), _run_dense(state, arrays, last - first, counted=False)

        # The caller begins while the other threads still wake up, and waits for them at the end: so the caller's part is
        # larger.
        each = int(plain.batch * _OTHER_SHARE / parts)
        ends = [plain.batch - each * other for other in range(parts - 1, -1, -1)]
        given, elsewhere = self._parts.run([functools.partial(run, *span) for span in itertools.pairwise([0, *ends])])
        outputs = [outputs for _, outputs in given if outputs is not None]
        if len(outputs) < parts:
            return None, elsewhere
        end = time.perf_counter()
        joined = [np.concatenate(pieces) for pieces in zip(*outputs, strict=True)]
        if _has_nan(joined):
            return None, elsewhere
        answer = _encoded(state.output_names, joined, plain.model.version, work.missing)
        state.stages.add("lookup", given[0][0] - (work.since or start))
        state.stages.add("dense", end - given[0][0])
        self._stats.stages.add("encode", time.perf_counter() - end)
        return answer, elsewhere


def _run_dense(
    state: Predictor, arrays: Sequence[NDArray[Any]], batch: int, *, counted: bool = True
) -> list[NDArray[Any]] | None:
    """The dense part's outputs for ``batch`` samples; None on an error, which the decoded path then reports.

    Args:
        counted: add the run to the state's figures.
    """
    try:
        outputs = state.run_engine_arrays(arrays, counted=counted)
    except Exception:
        return None
    if any(not output.ndim or output.shape[0] != batch or output.dtype != np.float32 for output in outputs):
        return None
    return outputs


def _has_nan(outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether ``outputs`` hold a NaN, which the decoded path answers with an error."""
    # Squares are never negative, so their sum is NaN only if an element is NaN; the sum may be infinite. See
    # PlainRequest.dense.
    return any(math.isnan(np.vdot(output, output)) for output in outputs)


def _encoded(
    names: Sequence[str], arrays: Sequence[NDArray[np.float32]], version: str, missing: tuple[int, ...]
) -> bytes:
    """A serialized PredictResponse of C-contiguous arrays, in the order of ``names``."""
    parts: list[Buffer] = [predict_head(version, missing)]
    for name, array in zip(names, arrays):
        parts += output_head(name, array.shape), array.data
    return b"".join(parts)


class ParallelParts:
    """Runs the parts of a request in parallel, on the caller's thread and on a pool. Several threads may call at a time.

    The caller runs each part that no other thread has begun when the caller reaches it: on a machine that is busy otherwise
    the parts take no longer than in sequence.

    Args:
        threads: number of threads for a caller's works, its own thread included.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="recinfer-part")

    def run(self, works: Sequence[Callable[[], T]]) -> tuple[list[T], float]:
        """Run ``works``; returns their results and the CPU seconds that other threads spent on them.

        Raises:
            Exception: the error of the first of the failed works; raised when all works have ended.
        """
        parts = [None, *map(self._offer, works[1:])]
        parts = [_run_here(work) if part is None or part.cancel() else part for work, part in zip(works, parts)]
        wait(part for part in parts if part is not None)
        results = [part.result() for part in parts if part is not None]
        return [result for result, _ in results], sum(seconds for _, seconds in results)

    def close(self) -> None:
        """End the threads; later works run on their callers' threads."""
        self._pool.shutdown(wait=False)

    def _offer(self, work: Callable[[], T]) -> Future[tuple[T, float]] | None:
        """Offer a work to the pool; None if the pool is closed."""
        try:
            return self._pool.submit(_timed, work)
        except RuntimeError:
            return None


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of ``work`` and its CPU seconds."""
    begun = time.thread_time()
    return work(), time.thread_time() - begun


def _run_here(work: Callable[[], T]) -> Future[tuple[T, float]]:
    """The outcome of ``work`` on this thread, with 0 seconds."""
    done: Future[tuple[T, float]] = Future()
    try:
        done.set_result((work(), 0.0))
    except Exception as error:
        done.set_exception(error)
    return done
