"""Latency of requests to many shards, computed: a queue model, hedged requests, and the slowest of several shards.

The queue is Lindley's recursion (D. V. Lindley, "The theory of queues with a single server", 1952) over measured service times;
the effect of fan-outs on tail latency is from J. Dean and L. A. Barroso, "The Tail at Scale", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.sizing.capacity import OBJECTIVE_SHARE, Measured

__all__ = ["Agreement", "agreement", "carried", "fanned", "hedged", "latencies", "waits"]

Array = NDArray[np.float64]

_REQUESTS = 100_000


def waits(arrival_s: Array, service_s: Array) -> Array:
    """Seconds that each request waits in a queue of one server: W[n+1] = max(0, W[n] + S[n] - A[n]).

    Args:
        arrival_s: arrival times, ascending ``[N]``.
        service_s: service times ``[N]``.
    """
    steps = np.concatenate(([0.0], np.cumsum(service_s[:-1] - np.diff(arrival_s))))
    return steps - np.minimum.accumulate(steps)


def latencies(qps: float, measured: Measured, *, seed: int = 0, requests: int = _REQUESTS) -> Array:
    """Latency of a Poisson process of ``qps`` requests per second: waiting time plus the latency of a lone request.

    Latencies of lone requests, and times between two responses of a busy server, are drawn from the measured
    distributions.
    """
    random = np.random.default_rng(seed)
    arrival_s = np.cumsum(random.exponential(1 / qps, requests))
    service_s = _drawn(measured.service_s, requests, random)
    return waits(arrival_s, service_s) + _drawn(measured.alone_s, requests, random)


def hedged(first: Array, second: Array, after_s: float) -> Array:
    """Latency of requests that are sent to a second replica after ``after_s`` without a response; ``second`` is its
    latency."""
    return np.where(first > after_s, np.minimum(first, after_s + second), first)


def fanned(shard: Array, shards: int, seed: int = 0) -> Array:
    """Latency of requests that need the answers of ``shards`` independent shards, each with the latencies ``shard``."""
    random = np.random.default_rng(seed)
    # The maximum of n draws is one draw at the n-th root of a uniform number.
    return np.quantile(shard, random.uniform(size=shard.size) ** (1 / shards))


@dataclass(frozen=True)
class Agreement:
    """Comparison of the queue model with the measurement, at the measured rate nearest to 70 % of the knee.

    Attributes:
        qps: the measured rate.
        measured_s, carried_s: p99.
        agrees: the two differ by no more than the measured spread, or by 20 %.
    """

    qps: float
    measured_s: float
    carried_s: float
    agrees: bool


def agreement(measured: Measured, *, seed: int = 0) -> Agreement:
    """Compare the queue model with the measurement. If they disagree, the model must not be used for other rates or
    shards."""
    kept = [point for point in measured.points if point.kept]
    if not kept or not measured.service_s:
        raise InputError(
            "capacity: expected a knee and a higher rate that missed the objective; measure without --max-qps"
        )
    point = min(kept, key=lambda each: abs(each.qps - 0.7 * measured.knee_qps))
    found = float(np.quantile(latencies(point.qps, measured, seed=seed), OBJECTIVE_SHARE))
    least, most = point.spread_s
    agrees = min(least, 0.8 * point.p99_s) <= found <= max(most, 1.2 * point.p99_s)
    return Agreement(point.qps, point.p99_s, found, agrees)


def carried(measured: Measured, *, shards: int, qps: float, hedge_after_s: float | None = None, seed: int = 0) -> Array:
    """Latency of requests that need ``shards`` shards, each of whose replicas gets ``qps`` requests per second.

    A ranker and one shard were measured together, so the ranker's part counts once per shard: an upper bound.

    Args:
        hedge_after_s: delay of a hedged request; None: no hedging.
    """
    one = latencies(qps, measured, seed=seed)
    if hedge_after_s is not None:
        one = hedged(one, latencies(qps, measured, seed=seed + 1), hedge_after_s)
    return fanned(one, shards, seed=seed + 2)


def _drawn(quantiles: Sequence[float], count: int, random: np.random.Generator) -> Array:
    at = np.linspace(0, 1, len(quantiles))
    return np.interp(random.uniform(size=count), at, np.asarray(quantiles))
