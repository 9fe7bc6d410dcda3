"""Puts load on a server and measures it: callers that each send the next request after an answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from recinfer.errors import InputError, RecinferError
from recinfer.serving.client.client import AsyncInferenceClient
from recinfer.serving.random_requests import RandomRequests
from recinfer.serving.wire.loop import run_on_loop

__all__ = ["LoadResult", "measure_load"]

_WARM_UP_S = 0.3
_REQUESTS, _MOST_IDS = 64, 1 << 25  # number of different prepared requests, and the bound on all their ids


@dataclass(frozen=True)
class LoadResult:
    """The result of one level of concurrency.

    Attributes:
        concurrency: number of callers.
        seconds: length of the measurement.
        latencies: seconds of each answered request, ascending.
        errors: refused or failed requests by the error's name.
        batch: samples of a request.
        reasons: message of the first error of each name.
    """

    concurrency: int
    seconds: float
    latencies: np.ndarray
    errors: dict[str, int]
    batch: int
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return self.latencies.size / self.seconds

    def percentile(self, percent: float) -> float:
        """Seconds within which ``percent`` of the answered requests were answered; nan without any."""
        return float(np.percentile(self.latencies, percent)) if self.latencies.size else float("nan")


def measure_load(
    target: str,
    *,
    call: Literal["lookup", "predict"] = "lookup",
    concurrency: Sequence[int] = (1, 8, 32),
    duration: float = 5.0,
    batch: int = 1,
    ids: int = 1,
    seed: int = 0,
    **client: Any,
) -> list[LoadResult]:
    """Measure ``target`` at each level of ``concurrency`` for ``duration`` seconds, after a short warm-up.

    Args:
        client: further arguments of AsyncInferenceClient: model, version, timeout (60 s unless given), token, tls_ca and
            others.

    Raises:
        InputError: an argument out of range.
        UnavailableError: no server answers.
    """
    if call not in ("lookup", "predict"):
        raise InputError(f"call: got {call!r}, expected 'lookup' or 'predict'")
    if not concurrency or min(concurrency) < 1 or duration <= 0 or batch < 1 or ids < 0:
        raise InputError("expected concurrency and batch of at least 1, ids of at least 0 and a duration above 0")
    # Retries would hide refused requests.
    arguments = {"timeout": 60.0, "tensors": False, **client, "retries": 0}
    return run_on_loop(_measure(target, call, concurrency, duration, batch, ids, seed, arguments))


async def _measure(
    target: str,
    call: str,
    concurrency: Sequence[int],
    duration: float,
    batch: int,
    ids: int,
    seed: int,
    arguments: Mapping[str, Any],
) -> list[LoadResult]:
    async with AsyncInferenceClient(target, **arguments) as client:
        model = await client.get_model()
        count = max(1, min(_REQUESTS, _MOST_IDS // max(1, batch * ids * len(model.features))))
        maker = RandomRequests(model, seed)
        lengths = {name: np.full(batch, ids, np.int32) for name in maker.names}
        requests = [
            {"features": maker.lookup(lengths)} if call == "lookup" else maker.predict(batch, lengths).arguments()
            for _ in range(count)
        ]
        results = []
        for callers in concurrency:
            await _run(client, call, requests, callers, min(_WARM_UP_S, duration))
            start = time.perf_counter()
            latencies, errors, reasons = await _run(client, call, requests, callers, duration)
            spent = time.perf_counter() - start
            results.append(LoadResult(callers, spent, np.sort(np.array(latencies)), dict(errors), batch, reasons))
        return results


async def _run(
    client: AsyncInferenceClient,
    call: str,
    requests: Sequence[Mapping[str, Any]],
    callers: int,
    duration: float,
) -> tuple[list[float], Counter[str], dict[str, str]]:
    latencies: list[float] = []
    errors: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    end = time.perf_counter() + duration

    async def repeat(first: int) -> None:
        at = first
        # Each caller sends one request at least, also if the machine pauses meanwhile.
        while (start := time.perf_counter()) < end or at == first:
            request = requests[at % len(requests)]
            at += 1
            try:
                await (client.lookup if call == "lookup" else client.predict)(**request)
            except RecinferError as error:
                errors[type(error).__name__] += 1
                reasons.setdefault(type(error).__name__, str(error))
                await asyncio.sleep(0.001)  # a server that refuses everything at once is not called in a tight loop
                continue
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(repeat(caller * 7) for caller in range(callers)))
    return latencies, errors, reasons
