"""Open-loop load on a running server: requests are sent at scheduled times, independently of earlier responses."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError, RecinferError
from recinfer.serving.client.client import AsyncInferenceClient, ModelDescription
from recinfer.serving.random_requests import RandomRequests
from recinfer.serving.wire import codec
from recinfer.serving.wire.loop import run_on_loop
from recinfer.sizing.arrivals import Trace

__all__ = ["Call", "Driver", "Measurement", "encode_requests"]

Call = Literal["lookup", "predict"]

# For the first request, which is not measured: a server may just have started, or answer old requests.
_OPENING_S = 60.0
_DISTINCT, _MOST_BYTES = 2048, 256 << 20  # maximum number and bytes of requests that are encoded in advance


@dataclass(frozen=True)
class Measurement:
    """Results of one measurement.

    Attributes:
        qps: scheduled requests per second.
        sent_s: seconds from the scheduled time of a request to its start, float64 ``[N]``: the driver's delay.
        latency_s: seconds from the scheduled time of a request to its response, float64 ``[N]``; infinite without a
            response.
        done_s: seconds from the start to each response, ascending, float64 ``[answered]``.
        errors: requests without a response, by error name.
        reason: the message of the first of them.
    """

    qps: float
    sent_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    errors: dict[str, int]
    reason: str = ""

    def percentile(self, percent: float) -> float:
        """Seconds within which ``percent`` of all scheduled requests were answered; infinite if they were not."""
        ordered = self._ordered
        return float(ordered[min(int(np.ceil(percent / 100 * ordered.size)), ordered.size) - 1])

    def share_within(self, seconds: float) -> float:
        """The share of all scheduled requests that were answered within ``seconds``."""
        return float(np.searchsorted(self._ordered, seconds, side="right") / self._ordered.size)

    @cached_property
    def _ordered(self) -> NDArray[np.float64]:
        return np.sort(self.latency_s)


def encode_requests(
    model: ModelDescription, call: Call, trace: Trace, *, name: str = "", version: str = "", seed: int = 0
) -> list[bytes]:
    """Serialized requests with the sizes of the first requests of ``trace`` and random ids; at most 2,048 of them.

    The ids of a request are divided over the model's features evenly, or in proportion to ``trace.ids_by_feature``.

    Args:
        model: the description of the model's inputs.
        name, version: the served model and version that the requests name; empty: the server's default.

    Raises:
        InputError: the trace names a feature that the model does not have.
    """
    maker = RandomRequests(model, seed)
    names = list(maker.names)
    unknown = sorted(set(trace.ids_by_feature) - set(names))
    if unknown:
        raise InputError(f"trace: the model has no feature {', '.join(unknown[:5])}; it has {', '.join(names[:20])}")
    total = sum(trace.ids_by_feature.values())
    shares = [trace.ids_by_feature.get(name, 0.0) / total if total else 1 / len(names) for name in names]
    random = np.random.default_rng(seed)
    requests: list[bytes] = []
    num_bytes = 0
    for batch, ids in zip(trace.batches[:_DISTINCT].tolist(), trace.ids[:_DISTINCT].tolist()):
        lengths = {each: _lengths(batch, ids * share, random) for each, share in zip(names, shares)}
        if call == "lookup":
            data = codec.encode_lookup_request(maker.lookup(lengths), name, version)
        else:
            data = codec.encode_predict_request(
                **maker.predict(batch, lengths).arguments(), model=name, version=version
            )
        requests.append(data)
        num_bytes += len(data)
        if num_bytes > _MOST_BYTES:
            break
    return requests


def _lengths(batch: int, mean: float, random: np.random.Generator) -> NDArray[np.int32]:
    """About ``mean`` ids in total, divided evenly over the samples."""
    if abs(mean - batch) < 0.5:
        return np.ones(batch, np.int32)
    # A fraction of an id becomes one id in that fraction of requests; a remainder goes to the first samples.
    count = int(mean) + int(random.random() < mean % 1)
    each = np.full(batch, count // batch, np.int32)
    each[: count % batch] += 1
    return each


class Driver:
    """Sends encoded requests to one server; :meth:`run` may be called from any one thread at a time.

    Args:
        target: ``"host:port"``.
        call: method of the requests.
        requests: serialized requests, sent in turn.
        timeout: seconds after which a request counts as not answered.
        client: further arguments of AsyncInferenceClient, for example token and tls_ca.
    """

    def __init__(self, target: str, call: Call, requests: Sequence[bytes], *, timeout: float, **client: Any) -> None:
        self._call = call.capitalize()
        self._requests = requests
        self._timeout = timeout
        # Retries and throttling would hide refused requests.
        self._client = AsyncInferenceClient(target, **{**client, "retries": 0, "throttle": False, "timeout": timeout})

    def run(self, due_s: NDArray[np.float64]) -> Measurement:
        """Send a request at each of ``due_s`` (seconds from the start, ascending) and wait for all responses."""
        return run_on_loop(self._run(due_s))

    def close(self) -> None:
        """Close the connection."""
        run_on_loop(self._client.close())

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _run(self, due_s: NDArray[np.float64]) -> Measurement:
        count = due_s.size
        sent, done = np.full(count, np.nan), np.full(count, np.inf)
        errors: Counter[str] = Counter()
        reasons: list[str] = []
        await self._client._call(self._call, self._requests[0], _OPENING_S)  # opens the connection

        async def ask(i: int) -> None:
            sent[i] = time.perf_counter() - begin
            try:
                await self._client._call(self._call, self._requests[i % len(self._requests)], self._timeout)
            except RecinferError as error:
                errors[type(error).__name__] += 1
                if not reasons:
                    reasons.append(str(error))
            else:
                done[i] = time.perf_counter() - begin

        # Only pending tasks are kept, since garbage collection traverses all of them.
        tasks: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []
        all_sent = asyncio.Event()

        def over(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        def send(first: int, last: int) -> None:
            for i in range(first, last):
                task = asyncio.ensure_future(ask(i))
                tasks.add(task)
                task.add_done_callback(over)
            if last == count:
                all_sent.set()

        stopped = threading.Event()
        was_frozen = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()  # excludes loaded objects from garbage collection, which would take longer than some objectives
        begin = time.perf_counter() + 0.01
        arguments = (asyncio.get_running_loop(), due_s, begin, send, stopped)
        threading.Thread(target=_when_due, args=arguments, name="recinfer-due", daemon=True).start()
        try:
            await all_sent.wait()
            await asyncio.gather(*tasks)
        finally:
            if not was_frozen:  # otherwise objects that the caller froze would be unfrozen
                gc.unfreeze()
            stopped.set()
            for task in tuple(tasks):
                task.cancel()
        if failures:
            raise failures[0]
        spread = float(due_s[-1] - due_s[0]) * count / max(count - 1, 1)
        answered = np.sort(done[np.isfinite(done)])
        reason = reasons[0] if reasons else ""
        return Measurement(count / (spread or 1.0), sent - due_s, done - due_s, answered, dict(errors), reason)


def _when_due(
    loop: asyncio.AbstractEventLoop,
    due_s: NDArray[np.float64],
    begin: float,
    send: Callable[[int, int], None],
    stopped: threading.Event,
) -> None:
    """Call ``send(first, last)`` on ``loop`` for requests as they become due. Timers of an event loop have a resolution
    of only 1 ms."""
    at = 0
    while at < due_s.size and not stopped.is_set():
        wait = begin + due_s[at] - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        now = time.perf_counter() - begin
        last = int(np.searchsorted(due_s, now, side="right"))
        if last > at:
            loop.call_soon_threadsafe(send, at, last)
            at = last
