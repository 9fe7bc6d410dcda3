"""State that the fan-outs of a ranker share: the replicas, their latencies, the budget of hedged requests, and figures.

:mod:`recinfer.serving.shards.fan_out_request` has a single fan-out.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from recinfer.archive.manifest import Manifest
from recinfer.errors import ConfigError
from recinfer.serving.shards.replicas import ReplicaPool
from recinfer.serving.shards.transport import rankers_thread

__all__ = ["FanOut", "waited_for"]

# Numbers of times: kept, enough for a percentile, and between two computations of the percentile.
_SAMPLES, _ENOUGH, _REFRESH = 512, 32, 64
_BURST = 10.0  # most unused hedges that are kept


class _AnswerTimes:
    """Seconds that answers take: ``p95`` is the 95th percentile of the last 512; nan before 32 answers."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_SAMPLES)
        self._count = 0
        self.p95 = math.nan

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self._count += 1
        if self._count == _ENOUGH or not self._count % _REFRESH:
            ordered = sorted(self._last)
            self.p95 = ordered[int(0.95 * len(ordered))]


class FanOut:
    """State of all fan-outs; :func:`~recinfer.serving.shards.fan_out_request.begin_fan_out` begins one.

    Any thread may call the methods up to ``status``; the others are for the transport's thread.

    Args:
        pool: the replicas.
        missing: overrides the settings' ``missing``; None: the settings decide.

    Attributes:
        calls: number of calls by outcome, over all ranks: ``sent``, ``hedged``, ``hedge_won``, ``retried``, ``failed``,
            ``not_prepared``.
        default_rows: number of requests whose answer lacked a rank, by rank.
        at_end_of_turn: see :meth:`recinfer.serving.shards.frames.ShardsThread.at_end_of_turn`; for callbacks of fan-outs.
        thread_id: the native id of the thread on which they run.
    """

    def __init__(self, pool: ReplicaPool, *, missing: str | None = None) -> None:
        self.pool = pool
        self._missing = missing
        self.calls: Counter[str] = Counter()
        self.default_rows: Counter[int] = Counter()
        self.at_end_of_turn, self.thread_id = rankers_thread().at_end_of_turn, rankers_thread().thread_id
        # The attributes below belong to the transport's thread.
        self._times: dict[tuple[int, int], _AnswerTimes] = {}
        self._hedges_left = _BURST
        self._turn = random.randrange(1 << 16)

    @property
    def missing(self) -> str | None:
        """The current setting for a rank without an answer; None: each manifest decides."""
        return self._missing or self.pool.config.settings.missing

    @property
    def gives_default_rows(self) -> bool:
        """Whether default rows are used where the manifest allows them."""
        return self.missing != "error"

    def check_manifest(self, manifest: Manifest) -> None:
        """Raise ConfigError if the settings request default rows that ``manifest`` does not allow."""
        if self.missing == "default_rows" and manifest.missing_shards != "default_rows":
            raise ConfigError(
                f"shards: missing is 'default_rows', but the archive of {manifest.model} {manifest.version} does not allow "
                "default rows; export or reshard it with --missing-shards default-rows, or set 'error'"
            )

    def status(self) -> dict[str, Any]:
        """Figures for metrics, as JSON."""
        ranks = sorted(self.pool.config.ranks)
        # Prometheus sees no increase in a counter that begins above zero, so each rank has one from the start.
        default_rows = dict.fromkeys(ranks, 0) | dict(self.default_rows)
        return {
            "calls": dict(self.calls),
            "default_rows": {str(rank): count for rank, count in default_rows.items()},
            "replicas": [
                {
                    "rank": rank,
                    "address": replica.target,
                    "up": replica.up and not replica.lack_of(rank),
                    "outstanding": replica.outstanding,
                    "versions": sorted(replica.versions),
                    "why": replica.lack_of(rank) or ("" if replica.up else replica.why),
                }
                for rank in ranks
                for replica in self.pool.listed(rank)
            ],
        }

    # -- on the transport's thread -----------------------------------------------------------------------------------

    def next_turn(self) -> int:
        """The next of consecutive numbers, which begin differently on each ranker."""
        self._turn += 1
        return self._turn

    def has_choice(self, ranks: Sequence[int]) -> bool:
        """Whether another replica may be called for one of ``ranks``."""
        return any(len(self.pool.replicas(rank)) > 1 for rank in ranks)

    def times(self, rank: int, batch: int) -> _AnswerTimes:
        """The times of a rank's answers to batches of about the size ``batch``."""
        key = rank, batch.bit_length()
        found = self._times.get(key)
        return self._times.setdefault(key, _AnswerTimes()) if found is None else found

    def earn_hedge(self) -> None:
        """Add a request's share, ``hedge_budget``, to the hedges that may be sent."""
        self._hedges_left = min(_BURST, self._hedges_left + self.pool.config.settings.hedge_budget)

    def spend_hedge(self) -> bool:
        """Take one hedge from those that may be sent; returns whether one was left."""
        if self._hedges_left < 1.0 or not self.pool.config.settings.hedge:
            return False
        self._hedges_left -= 1.0
        return True


def waited_for(begin: Callable[[Callable[..., object]], object]) -> Future[Any]:
    """Call ``begin`` with a callback; returns a future of the callback's arguments before its last, the error."""
    future: Future[Any] = Future()

    def done(*found: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        *values, error = found
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(values[0] if len(values) == 1 else tuple(values))

    begin(done)
    return future
