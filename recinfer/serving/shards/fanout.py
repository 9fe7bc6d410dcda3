"""Who asks ranks: which requests are sent, how long answers take, and how many more may be asked for."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from recinfer.archive.manifest import Manifest
from recinfer.errors import ConfigError
from recinfer.serving.shards.fan import Answers, Ask, Fan, Try
from recinfer.serving.shards.messages import Parts
from recinfer.serving.shards.pool import ReplicaPool
from recinfer.serving.shards.quick import Lookout, QuickFan, Told

__all__ = ["Fanout"]

_SAMPLES, _ENOUGH, _REFRESH = 512, 32, 64
_BURST = 10.0


class _Pace:
    """How long answers take: the 95th percentile of the last ones."""

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


class Fanout:
    """Sends parts of requests to ranks.

    Args:
        pool: the replicas.
        missing: instead of the settings' ``missing``; None: as the settings say.

    Attributes:
        calls: by (rank-independent) outcome: ``sent``, ``hedged``, ``hedge_won``, ``retried``, ``failed``,
            ``not_prepared``.
        default_rows: requests whose answer lacked a rank, by rank.
    """

    def __init__(self, pool: ReplicaPool, *, missing: str | None = None) -> None:
        self.pool, self._missing = pool, missing
        self.calls: Counter[str] = Counter()
        self.default_rows: Counter[int] = Counter()
        self._paces: dict[tuple[int, int], _Pace] = {}
        self._tokens = _BURST
        self._turn = random.randrange(1 << 16)
        self._lock = threading.Lock()  # of all figures: calls are made on the loop and on gRPC's threads
        self.loop = pool.loop
        self.lookout = Lookout(pool.loop)

    async def find(
        self,
        version: str,
        batch: int,
        parts: Mapping[int, Parts],
        deadline: float,
        *,
        exact: bool = False,
        default_rows: bool = False,
    ) -> tuple[Answers, tuple[int, ...]]:
        """The arrays that each rank gives for its parts, and the ranks that nobody answered for.

        Args:
            version: key of the version that all of them are asked for.
            parts: rank -> its parts of the message.
            deadline: of ``time.monotonic()``; infinite: the settings' timeout counts.
            exact: float32 whatever the settings say, for golden requests.
            default_rows: whether the version's manifest allows default rows where nobody answers; the settings may forbid
                them.

        Raises:
            UnavailableError: a rank has no living replica, and default rows are not allowed, or forbidden.
            DeadlineError: the deadline passed.
        """
        fan = Fan(self, self._of(version, batch, parts, deadline, default_rows, exact))
        try:
            await fan.run()
        finally:
            fan.cancel()
        return fan.answers, fan.missing

    def begin(
        self,
        version: str,
        batch: int,
        parts: Mapping[int, Parts],
        deadline: float,
        told: Told,
        *,
        default_rows: bool = False,
    ) -> bool:
        """The same from any thread, without waiting: ``told`` hears what :meth:`find` returns or raises. False: it has to be
        :meth:`find`.
        """
        return QuickFan(self, self._of(version, batch, parts, deadline, default_rows), told).begin()

    def _of(
        self,
        version: str,
        batch: int,
        parts: Mapping[int, Parts],
        deadline: float,
        default_rows: bool,
        exact: bool = False,
    ) -> Ask:
        settings = self.pool.config.settings
        until = min(deadline, time.monotonic() + settings.timeout_seconds)
        half = settings.half and not exact
        return Ask(version, batch, parts, until, half=half, stored=not half, default_rows=default_rows)

    @property
    def missing(self) -> str | None:
        """What a rank that nobody answers for means, by the settings of this moment; None: as each manifest says."""
        return self._missing or self.pool.config.settings.missing

    @property
    def gives_default_rows(self) -> bool:
        """Whether a manifest that allows default rows where nobody answers is followed."""
        return self.missing != "error"

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises ConfigError when the settings ask for default rows that ``manifest`` does not allow."""
        if self.missing == "default_rows" and manifest.missing_shards != "default_rows":
            raise ConfigError(
                f"shards: missing is 'default_rows', but the archive of {manifest.model} {manifest.version} does not allow "
                "default rows; export or reshard it with --missing-shards default-rows, or set 'error'"
            )

    # -- figures, from any thread ------------------------------------------------------------------------------------

    def turn(self) -> int:
        """A number that goes up by one each time; rankers begin at different ones."""
        with self._lock:
            self._turn += 1
            return self._turn

    def has_choice(self, ranks: Sequence[int]) -> bool:
        """Whether another replica may be asked for one of ``ranks``."""
        return any(len(self.pool.replicas(rank)) > 1 for rank in ranks)

    def pace(self, rank: int, batch: int) -> _Pace:
        """Times of answers of a rank to batches of about that size."""
        key = rank, batch.bit_length()
        found = self._paces.get(key)
        return self._paces.setdefault(key, _Pace()) if found is None else found

    def timed(self, each: Try, batch: int, seconds: float) -> None:
        """An answer to ``each``, or to what it stands in for, took that long."""
        with self._lock:
            self.pace(each.ranks[0], batch).add(seconds)

    def sent(self, each: Try) -> None:
        """A call is sent; each that is no hedge earns a part of another."""
        each.replica.asked()
        with self._lock:
            self.calls["hedged" if each.hedge else "sent"] += 1
            if not each.hedge:
                self._tokens = min(_BURST, self._tokens + self.pool.config.settings.hedge_budget)

    def spend(self) -> bool:
        """Whether one more request may be sent."""
        with self._lock:
            if self._tokens < 1.0 or not self.pool.config.settings.hedge:
                return False
            self._tokens -= 1.0
            return True

    def count(self, outcome: str) -> None:
        """One more of ``calls``."""
        with self._lock:
            self.calls[outcome] += 1

    def lost(self, ranks: Sequence[int]) -> None:
        """A request's answer will lack ``ranks``."""
        with self._lock:
            self.default_rows.update(ranks)

    def status(self) -> dict[str, Any]:
        """Figures for metrics, as JSON."""
        return {
            "calls": dict(self.calls),
            "default_rows": {str(rank): count for rank, count in self.default_rows.items()},
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
