"""State that the fan-outs of a ranker share: the replicas, their latencies, the budget of hedged requests, and figures.

One fan-out is :mod:`recinfer.serving.shards.fan_out_request`.
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

# Times that are kept, that make a percentile, and after which it is found anew.
_SAMPLES, _ENOUGH, _REFRESH = 512, 32, 64
_BURST = 10.0  # hedges that may be saved up


class _AnswerTimes:
    """How long answers take: the 95th percentile of the last ones; nan: not known yet."""

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
    """What requests that go to the shards share; :func:`~recinfer.serving.shards.fan_out_request.begin_fan_out` sends one.

    Any thread may use it, but for what stands at the end.

    Args:
        pool: the replicas.
        missing: instead of the settings' ``missing``; None: as the settings say.

    Attributes:
        calls: by (rank-independent) outcome: ``sent``, ``hedged``, ``hedge_won``, ``retried``, ``failed``,
            ``not_prepared``.
        default_rows: requests whose answer lacked a rank, by rank.
        at_end_of_turn: see :meth:`recinfer.serving.shards.frames.ShardsThread.at_end_of_turn`; for callbacks of this.
    """

    def __init__(self, pool: ReplicaPool, *, missing: str | None = None) -> None:
        self.pool, self._missing = pool, missing
        self.calls: Counter[str] = Counter()
        self.default_rows: Counter[int] = Counter()
        self.at_end_of_turn = rankers_thread().at_end_of_turn
        # What follows is the thread's.
        self._times: dict[tuple[int, int], _AnswerTimes] = {}
        self._hedges_left = _BURST
        self._turn = random.randrange(1 << 16)

    @property
    def missing(self) -> str | None:
        """The current setting for a rank without an answer; None: as each manifest says."""
        return self._missing or self.pool.config.settings.missing

    @property
    def half(self) -> bool:
        """Whether shards send vectors as float16, by the current settings."""
        return self.pool.config.settings.half

    @property
    def gives_default_rows(self) -> bool:
        """Whether default rows are used where the manifest allows them."""
        return self.missing != "error"

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises ConfigError when the settings request default rows that ``manifest`` does not allow."""
        if self.missing == "default_rows" and manifest.missing_shards != "default_rows":
            raise ConfigError(
                f"shards: missing is 'default_rows', but the archive of {manifest.model} {manifest.version} does not allow "
                "default rows; export or reshard it with --missing-shards default-rows, or set 'error'"
            )

    def status(self) -> dict[str, Any]:
        """Figures for metrics, as JSON."""
        return {
            "calls": dict(self.calls),
            "default_rows": {str(rank): count for rank, count in dict(self.default_rows).items()},
            "replicas": [
                {
                    "rank": rank,
                    "address": replica.target,
                    "up": replica.up and not replica.lack_of(rank),
                    "outstanding": replica.outstanding,
                    "versions": sorted(replica.versions),
                    "why": replica.lack_of(rank) or ("" if replica.up else replica.why),
                }
                for rank in sorted(self.pool.config.ranks)
                for replica in self.pool.listed(rank)
            ],
        }

    # -- on the transport's thread -----------------------------------------------------------------------------------

    def next_turn(self) -> int:
        """A number that goes up by one each time; rankers begin at different ones."""
        self._turn += 1
        return self._turn

    def has_choice(self, ranks: Sequence[int]) -> bool:
        """Whether another replica may be called for one of ``ranks``."""
        return any(len(self.pool.replicas(rank)) > 1 for rank in ranks)

    def times(self, rank: int, batch: int) -> _AnswerTimes:
        """Of a rank's answers to batches of about that size."""
        key = rank, batch.bit_length()
        found = self._times.get(key)
        return self._times.setdefault(key, _AnswerTimes()) if found is None else found

    def earn_hedge(self) -> None:
        """Each request that is no hedge earns a part of one."""
        self._hedges_left = min(_BURST, self._hedges_left + self.pool.config.settings.hedge_budget)

    def spend_hedge(self) -> bool:
        """Whether one may be sent."""
        if self._hedges_left < 1.0 or not self.pool.config.settings.hedge:
            return False
        self._hedges_left -= 1.0
        return True


def waited_for(begin: Callable[[Callable[..., object]], object]) -> Future[Any]:
    """A future of what ``begin`` passes to its callback: all but the error, which comes last."""
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
