"""The engine's paths one by one, for tests: answers from bytes, or None where only the decoded path can answer."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Sequence
from typing import Any

from recinfer.inference.lookups import run_now
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.dispatcher import Dispatcher, Predictions, lookup_now
from recinfer.serving.engine.remote_byte_path import FanOuts
from recinfer.serving.engine.request import CallName, PlainReader, PlainRequest, Request
from recinfer.serving.engine.scheduler import Scheduler
from recinfer.serving.wire.limits import BatchConfig

LONG = 90.0


class _Left(Exception):
    """The decoded path has to answer."""


class BytePath:
    """The byte paths of a service.

    Args:
        threads: for long runs, and for parts of one request.
    """

    def __init__(self, service: InferenceService, threads: int = 1, max_batch: int = 1024) -> None:
        self.service = service
        self.reader = PlainReader(service.registry, service.limits)
        self.scheduler = Scheduler(BatchConfig(max_batch=max_batch), threads)
        self.predictions = Predictions(self.scheduler, service.stats, _leave, threads)
        self.fan_outs = FanOuts(self.scheduler, self.predictions.submit, service.stats, _leave)

    def close(self) -> None:
        self.scheduler.close()
        self.predictions.close()

    def read(self, data: bytes) -> PlainRequest | None:
        return self.reader.read(data)

    def lookup(self, data: bytes) -> bytes | None:
        plain = self.read(data)
        return None if plain is None else lookup_now(plain, self.service.stats)

    def predict(self, *messages: bytes) -> list[bytes | None]:
        """The answers to predictions that arrive in one turn."""
        answers: list[Any] = [None] * len(messages)
        done: queue.SimpleQueue[int] = queue.SimpleQueue()

        def asked(at: int, data: bytes) -> bool:
            plain = self.read(data)
            if plain is None or not plain.can_predict():
                return False

            def reply(answer: bytes | Exception) -> None:
                answers[at] = None if isinstance(answer, _Left) else answer
                done.put(at)

            self.predictions.submit(Request("Predict", data, math.inf, reply), plain, plain.fill)
            return True

        count = sum([asked(at, data) for at, data in enumerate(messages)])
        self.scheduler.run_ready()
        for _ in range(count):
            done.get(timeout=LONG)
        return answers

    def split(self, call: CallName, data: bytes) -> Any:
        """The requests to each rank; None where only the decoded path can answer."""
        plain = self.read(data)
        if plain is None or (call == "Predict" and (not plain.can_predict() or plain.dense() is None)):
            return None
        return plain.order.split(plain.bag_data, plain.bags)  # type: ignore[attr-defined]

    def begin(self, call: CallName, data: bytes, reply: Any, seconds: float = LONG) -> bool:
        """Send requests to the shards; ``reply`` gets the answer. False: only the decoded path can answer."""
        plain = self.read(data)
        if plain is None:
            return False
        self.fan_outs.start(Request(call, data, time.monotonic() + seconds, reply), plain)
        return True

    def remote(self, call: CallName, data: bytes, seconds: float = LONG) -> Any:
        """The shards' answer, or recinfer's error; None where only the decoded path can answer."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self.begin(call, data, done.put, seconds):
            return None
        self.scheduler.run_ready()
        answer = done.get(timeout=LONG)
        return None if isinstance(answer, _Left) else answer


def _leave(request: Request) -> None:
    request.reply(_Left())


def decoded(service: InferenceService, call: CallName, data: bytes) -> bytes:
    """The decoded path's answer to one request; raises its error."""
    (answer,) = run_now(service.run([service.decode(call, data)]))
    if isinstance(answer, Exception):
        raise answer
    return answer


def together(service: InferenceService, call: CallName, messages: Sequence[bytes]) -> list[bytes | Exception]:
    """The answers to requests that arrive in one turn, each by the path that it takes."""
    dispatcher = Dispatcher(service, BatchConfig(), 1)
    try:
        return dispatcher.answer_all([(call, data) for data in messages], math.inf)
    finally:
        dispatcher.close()
