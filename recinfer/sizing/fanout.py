"""A request that needs many shards, on paper: quantiles that shards must keep, a queue in numpy, hedged requests.

The queue is Lindley's recursion (D. V. Lindley, "The theory of queues with a single server", 1952) over measured service times;
what a fan-out does to a tail is from J. Dean and L. A. Barroso, "The Tail at Scale", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.sizing.capacity import PROMISED, Measured

__all__ = ["Agreement", "agreement", "carried", "fanned", "hedged", "latencies", "needed_quantile", "waits"]

Array = NDArray[np.float64]

_REQUESTS = 100_000


def needed_quantile(promise: float, shards: int) -> float:
    """The share of its answers that each of ``shards`` independent shards must give in time, so that ``promise`` of the requests
    that need all of them are.
    """
    if not 0 < promise < 1 or shards < 1:
        raise InputError(
            f"got a promise of {promise} and {shards} shards, expected 0 < promise < 1 and at least one shard"
        )
    return float(promise ** (1 / shards))


def waits(arrival_s: Array, service_s: Array) -> Array:
    """Seconds that each request waits in a queue of one server: W[n+1] = max(0, W[n] + S[n] - A[n]).

    Args:
        arrival_s: when requests come, ascending ``[N]``.
        service_s: how long each is served ``[N]``.
    """
    steps = np.concatenate(([0.0], np.cumsum(service_s[:-1] - np.diff(arrival_s))))
    return steps - np.minimum.accumulate(steps)


def latencies(qps: float, measured: Measured, *, seed: int = 0, requests: int = _REQUESTS) -> Array:
    """Latency of requests that come independently of each other, ``qps`` a second: a wait, and what a lone request takes.

    What a lone request takes and how far answers of a server that is never idle are apart are drawn from what was measured.
    """
    random = np.random.default_rng(seed)
    arrival_s = np.cumsum(random.exponential(1 / qps, requests))
    service_s = _drawn(measured.service_s, requests, random)
    return waits(arrival_s, service_s) + _drawn(measured.alone_s, requests, random)


def hedged(first: Array, second: Array, after_s: float) -> Array:
    """Latency where a request that has no answer after ``after_s`` is sent to another replica too; ``second``: of that one."""
    return np.where(first > after_s, np.minimum(first, after_s + second), first)


def fanned(shard: Array, shards: int, seed: int = 0) -> Array:
    """Latency of requests that need the answers of ``shards`` independent shards, each with the latencies ``shard``."""
    random = np.random.default_rng(seed)
    # The maximum of n draws is one draw at the n-th root of a uniform number.
    return np.quantile(shard, random.uniform(size=shard.size) ** (1 / shards))


@dataclass(frozen=True)
class Agreement:
    """The queue on paper beside the server, at the rate of a measured point nearest to 70 % of the knee.

    Attributes:
        qps: that rate.
        measured_s, carried_s: p99.
        agrees: they differ by no more than the measured stretches do among each other, or by 20 %.
    """

    qps: float
    measured_s: float
    carried_s: float
    agrees: bool


def agreement(measured: Measured, *, seed: int = 0) -> Agreement:
    """Whether the queue on paper gives what was measured; where it does not, nothing may be carried to other rates or shards."""
    kept = [point for point in measured.points if point.kept]
    if not kept or not measured.service_s:
        raise InputError(
            "capacity: expected a knee with a rate above it that broke the promise; measure without --max-qps"
        )
    point = min(kept, key=lambda each: abs(each.qps - 0.7 * measured.knee_qps))
    found = float(np.quantile(latencies(point.qps, measured, seed=seed), PROMISED))
    least, most = point.spread_s
    agrees = min(least, 0.8 * point.p99_s) <= found <= max(most, 1.2 * point.p99_s)
    return Agreement(point.qps, point.p99_s, found, agrees)


def carried(measured: Measured, *, shards: int, qps: float, hedge_after_s: float | None = None, seed: int = 0) -> Array:
    """Latency of requests that need ``shards`` shards, each of whose replicas gets ``qps`` requests a second.

    What was measured is a ranker and one shard together, so the ranker's part counts once a shard: an upper bound.

    Args:
        hedge_after_s: a second replica is asked after so long; None: none is.
    """
    one = latencies(qps, measured, seed=seed)
    if hedge_after_s is not None:
        one = hedged(one, latencies(qps, measured, seed=seed + 1), hedge_after_s)
    return fanned(one, shards, seed=seed + 2)


def _drawn(quantiles: Sequence[float], count: int, random: np.random.Generator) -> Array:
    at = np.linspace(0, 1, len(quantiles))
    return np.interp(random.uniform(size=count), at, np.asarray(quantiles))
