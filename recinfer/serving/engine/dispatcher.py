"""Chooses the path on which a request is answered; the paths are the same for every protocol.

1. A small plain lookup in tables of this process: answered from its bytes, now.
2. A plain prediction: from its bytes, in a short run that it shares with others that are ready.
3. A plain prediction whose run is long: on a worker thread.
4. A large plain prediction that is the only request: in parts, on several threads.
5. A plain request of a ranker: split here, looked up on shard servers, joined; the dense part then runs as in 2 to 4.
6. Any other request: decoded and run on a worker thread; a ranker's request waits for shard servers without a thread.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

from recinfer.inference.byte_tables import AwaitedLookup
from recinfer.serving.engine.batch_config import BatchConfig
from recinfer.serving.engine.byte_path import Predictions, lookup_now
from recinfer.serving.engine.decoded_path import DecodedRuns, InferenceService
from recinfer.serving.engine.memory_budget import UNCOUNTED, Ticket
from recinfer.serving.engine.remote_byte_path import FanOuts
from recinfer.serving.engine.request import CallName, PlainReader, PlainRequest, Request, trace_of_task
from recinfer.serving.engine.scheduler import Scheduler

__all__ = ["Dispatcher", "LoopCaller"]

_FLOAT_BYTES = 4
_FEW_BYTES = 64 << 10


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
        self._fan_outs = FanOuts(self.scheduler, self._predictions, stats, self._decoded.submit)

    def close(self) -> None:
        """End the threads; call this after the last request."""
        self.scheduler.close()
        self._predictions.close()

    def dispatch(self, request: Request) -> None:
        """Answer ``request``, or queue it. Never raises: errors are replied. The caller calls ``scheduler.run_ready``
        when it has no further request."""
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
