"""Asks several ranks at once: the least busy replica of each, a second one when the first is slow or gone.

One :class:`_Fan` is one request's calls. Everything happens on the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from numpy.typing import NDArray

from recinfer.archive.manifest import Manifest
from recinfer.errors import ConfigError, DeadlineError, OverloadedError, RecinferError, UnavailableError
from recinfer.serving.remote.messages import Parts, decode_response, join_request
from recinfer.serving.remote.pool import ReplicaPool
from recinfer.serving.remote.replica import Replica

__all__ = ["Answers", "Fanout"]

_SAMPLES, _ENOUGH, _REFRESH = 512, 32, 64
_FIRST_HEDGE_S = 0.05  # until enough answers were timed
_LEAST_HEDGE_S = 1e-3
_GIVE_UP, _LEAST_GIVE_UP_S = 20, 0.25
_BURST = 10.0
_RETRIES = 1

Answers = dict[int, list[NDArray[Any]]]


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

    def turn(self) -> int:
        """A number that goes up by one each time; rankers begin at different ones."""
        self._turn += 1
        return self._turn

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
        limit = time.monotonic() + self.pool.config.settings.timeout_seconds
        half = self.pool.config.settings.half and not exact
        fan = _Fan(self, version, batch, parts, min(deadline, limit), half, default_rows)
        try:
            await fan.run()
        finally:
            fan.cancel()
        return fan.answers, fan.missing

    @property
    def missing(self) -> str | None:
        """What a rank that nobody answers for means, by the settings of this moment; None: as each manifest says."""
        return self._missing or self.pool.config.settings.missing

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises ConfigError when the settings ask for default rows that ``manifest`` does not allow."""
        if self.missing == "default_rows" and manifest.missing_shards != "default_rows":
            raise ConfigError(
                f"shards: missing is 'default_rows', but the archive of {manifest.model} {manifest.version} does not allow "
                "default rows; export or reshard it with --missing-shards default-rows, or set 'error'"
            )

    def pace(self, rank: int, batch: int) -> _Pace:
        """Times of answers of a rank to batches of about that size."""
        key = rank, batch.bit_length()
        found = self._paces.get(key)
        if found is None:
            found = self._paces[key] = _Pace()
        return found

    def earn(self) -> None:
        """A request was sent: a part of another may be."""
        self._tokens = min(_BURST, self._tokens + self.pool.config.settings.hedge_budget)

    def spend(self) -> bool:
        """Whether one more request may be sent."""
        if self._tokens < 1.0 or not self.pool.config.settings.hedge:
            return False
        self._tokens -= 1.0
        return True

    def status(self) -> dict[str, Any]:
        """Figures for metrics, as JSON."""
        return {
            "calls": dict(self.calls),
            "default_rows": {str(rank): count for rank, count in self.default_rows.items()},
            "replicas": [
                {
                    "rank": rank,
                    "address": replica.target,
                    "up": replica.up,
                    "outstanding": replica.outstanding,
                    "versions": sorted(replica.versions),
                    "why": "" if replica.up else replica.why,
                }
                for rank in sorted(self.pool.config.ranks)
                for replica in self.pool.replicas(rank)
            ],
        }


def _result(call: grpc.aio.UnaryUnaryCall[bytes, bytes]) -> bytes:
    """What a call that has ended gave; raises what it raised."""
    try:
        next(call.__await__())
    except StopIteration as stop:
        data: bytes = stop.value
        return data
    raise RecinferError("a call that had ended gave no answer")


class _Try:
    """One call to one replica for some ranks."""

    __slots__ = ("call", "count", "hedge", "over", "ranks", "replica", "since", "timer")

    def __init__(self, replica: Replica, ranks: tuple[int, ...], hedge: bool) -> None:
        self.replica, self.ranks, self.hedge = replica, ranks, hedge
        self.since = time.monotonic()
        self.call: grpc.aio.UnaryUnaryCall[bytes, bytes] | None = None
        self.count = 0  # parts that it was sent
        self.timer: asyncio.TimerHandle | None = None
        self.over = False


class _Fan:
    """The calls of one request."""

    def __init__(
        self,
        fanout: Fanout,
        version: str,
        batch: int,
        parts: Mapping[int, Parts],
        deadline: float,
        half: bool,
        default_rows: bool,
    ) -> None:
        self._fanout, self._pool = fanout, fanout.pool
        self._version, self._batch, self._parts, self._deadline = version, batch, parts, deadline
        self._half, self._default_rows = half, default_rows
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._tries: list[_Try] = []
        self._asked: dict[int, list[Replica]] = {rank: [] for rank in parts}
        self._retried: dict[int, int] = {}
        self.answers: Answers = {}
        self.missing: tuple[int, ...] = ()

    async def run(self) -> None:
        """Return once every rank has answered, or is missing by permission."""
        self._ask(tuple(self._parts))
        await self._done  # each call has the deadline, and gRPC ends it then

    def cancel(self) -> None:
        """End what is still under way."""
        for each in self._tries:
            self._end(each)

    def _too_late(self) -> None:
        ranks = ", ".join(str(rank) for rank in self._parts if rank not in self.answers)
        for each in self._tries:
            if not each.over:
                each.replica.was_slow(time.monotonic() - each.since)
        self._fail(DeadlineError(f"the deadline passed before rank {ranks} had answered"))

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    # -- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, ranks: Sequence[int], *, hedge: bool = False) -> bool:
        """Send ``ranks`` to replicas that were not asked for them yet, one request a replica; whether all were sent."""
        chosen: dict[Replica, list[int]] = {}
        lost = []
        for rank in ranks:
            replica = self._choose(rank, chosen)
            if replica is None:
                lost.append(rank)
            else:
                chosen.setdefault(replica, []).append(rank)
        for replica, mine in chosen.items():
            self._send(replica, tuple(mine), hedge)
        if lost and not hedge:
            self._lose(lost)
        return not lost

    def _choose(self, rank: int, chosen: Mapping[Replica, list[int]]) -> Replica | None:
        asked = self._asked[rank]
        best: Replica | None = None
        least: Any = None
        replicas = self._pool.replicas(rank)
        if len(replicas) == 1:
            return replicas[0] if replicas[0] not in asked and replicas[0].usable(self._version) else None
        now = time.monotonic()
        # Of equals another one each time: else all rankers that are hardly busy would ask the first that is listed.
        first = self._fanout.turn() % len(replicas) if replicas else 0
        for replica in (*replicas[first:], *replicas[:first]):
            if replica in asked or not replica.usable(self._version):
                continue
            load = replica.load(now)
            if replica in chosen and not load[0]:
                return replica  # it is asked for another rank anyway
            if least is None or load < least:
                best, least = replica, load
        return best

    def _send(self, replica: Replica, ranks: tuple[int, ...], hedge: bool) -> None:
        each = _Try(replica, ranks, hedge)
        self._tries.append(each)
        for rank in ranks:
            self._asked[rank].append(replica)
        replica.outstanding += 1
        self._fanout.calls["hedged" if hedge else "sent"] += 1
        if not hedge:
            self._fanout.earn()
            if any(len(self._pool.replicas(rank)) > 1 for rank in ranks):
                pace = self._fanout.pace(ranks[0], self._batch).p95
                delay = _FIRST_HEDGE_S if math.isnan(pace) else max(_LEAST_HEDGE_S, pace)
                each.timer = self._loop.call_later(delay, self._slow, each, delay)
        self._call(each)

    def _slow(self, each: _Try, delay: float) -> None:
        """It takes longer than 95 % of the others."""
        if each.over or self._done.done():
            return
        left = tuple(rank for rank in each.ranks if rank not in self.answers)
        if left and self._others(left) and self._fanout.spend():
            self._ask(left, hedge=True)
            return
        give_up = max(_LEAST_GIVE_UP_S, _GIVE_UP * delay)
        each.timer = self._loop.call_later(max(0.0, each.since + give_up - time.monotonic()), self._very_slow, each)

    def _very_slow(self, each: _Try) -> None:
        """It takes so long that the host may be gone without a word: ask another one, budget or not."""
        left = tuple(rank for rank in each.ranks if rank not in self.answers)
        if not each.over and not self._done.done() and left and self._others(left):
            self._fanout.calls["retried"] += 1
            self._ask(left, hedge=True)

    def _others(self, ranks: Sequence[int]) -> bool:
        """Whether each of ``ranks`` has a replica that was not asked."""
        return all(
            any(r not in self._asked[rank] and r.usable(self._version) for r in self._pool.replicas(rank))
            for rank in ranks
        )

    # -- what comes back ---------------------------------------------------------------------------------------------

    def _call(self, each: _Try) -> None:
        """Ask. gRPC runs a task for each call; a second one of ours would only wait for it."""
        replica = each.replica
        parts = [part for rank in each.ranks for part in self._parts[rank]]
        each.count = len(parts)
        try:
            request = join_request(self._version, self._batch, parts, half=self._half)
            left = max(0.001, self._deadline - time.monotonic())
            each.call = replica.find(request, timeout=left, metadata=replica.metadata)
            # It is called by gRPC's task, whose result is there once that has ended.
            each.call.add_done_callback(lambda _: self._loop.call_soon(self._ended, each))
        except Exception as error:  # the channel is closed
            self._stop(each)
            self._fail(error)

    def _ended(self, each: _Try) -> None:
        if each.over:
            return
        assert each.call is not None
        try:
            data = _result(each.call)
            arrays = decode_response(data, self._half)
            if len(arrays) != each.count:
                raise RecinferError(f"shard {each.replica.target} answered {len(arrays)} parts of {each.count}")
        except grpc.aio.AioRpcError as error:
            self._stop(each)
            self._failed(each, error.code(), error.details() or "")
        except asyncio.CancelledError:  # its channel was closed
            self._stop(each)
            self._failed(each, grpc.StatusCode.CANCELLED, "the connection was closed")
        except Exception as error:  # ours: nobody else would hear of it
            self._stop(each)
            self._fail(error)
        else:
            self._stop(each)
            self._answered(each, arrays)

    def _stop(self, each: _Try) -> None:
        each.over = True
        each.replica.outstanding -= 1
        if each.timer is not None:
            each.timer.cancel()

    def _end(self, each: _Try) -> None:
        """Cancel a call whose answer nobody needs."""
        if not each.over:
            self._stop(each)
            if each.call is not None:
                each.call.cancel()

    def _answered(self, each: _Try, arrays: list[NDArray[Any]]) -> None:
        now = time.monotonic()
        each.replica.answered(now - each.since)
        at = 0
        won = False
        for rank in each.ranks:
            count = len(self._parts[rank])
            if rank not in self.answers:
                self.answers[rank] = arrays[at : at + count]
                won = True
            at += count
        first = next((t for t in self._tries if not t.hedge and each.ranks[0] in t.ranks), each)
        self._fanout.pace(each.ranks[0], self._batch).add(now - first.since)
        if each.hedge and won:
            self._fanout.calls["hedge_won"] += 1
        for other in self._tries:
            if not other.over and all(rank in self.answers for rank in other.ranks):
                if won and other.since < each.since:
                    other.replica.was_slow(now - other.since)
                self._end(other)
        self._look()

    def _look(self) -> None:
        if len(self.answers) + len(self.missing) == len(self._parts) and not self._done.done():
            self._done.set_result(None)

    def _failed(self, each: _Try, code: grpc.StatusCode, details: str) -> None:
        if self._done.done():
            return
        left = [rank for rank in each.ranks if rank not in self.answers and not self._is_asked(rank)]
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            self._fanout.calls["not_prepared"] += 1
            each.replica.lacks(self._version)
            self._ask(left)
        elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED):
            self._fanout.calls["failed"] += 1
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                each.replica.why = details
            else:
                each.replica.failed(f"{code.name}: {details[:200]}")
            self._retry(left, code, details)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._too_late()
        else:
            self._fail(RecinferError(f"shard {each.replica.target} failed: {code.name}: {details}"))

    def _is_asked(self, rank: int) -> bool:
        """Whether somebody may still answer for ``rank``."""
        return any(not each.over and rank in each.ranks for each in self._tries)

    def _retry(self, ranks: Sequence[int], code: grpc.StatusCode, details: str) -> None:
        again = [rank for rank in ranks if self._retried.get(rank, 0) < _RETRIES]
        self._retried.update({rank: self._retried.get(rank, 0) + 1 for rank in again})
        if again:
            self._fanout.calls["retried"] += 1
            self._ask(again)
        lost = [rank for rank in ranks if rank not in again]
        if lost and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._fail(OverloadedError(f"rank {lost[0]}: {details}"))
        elif lost:
            self._lose(lost)

    def _lose(self, ranks: Sequence[int]) -> None:
        """Nobody can be asked for ``ranks``."""
        if self._default_rows and self._fanout.missing != "error":
            self._fanout.default_rows.update(ranks)
            self.missing = (*self.missing, *ranks)
            self._look()
            return
        where = "; ".join(f"rank {rank} has no living replica: {self._pool.addresses(rank)}" for rank in ranks)
        if self._fanout.missing == "default_rows":
            where += "; shards.json asks for default rows, but the archive's manifest does not allow them"
        self._fail(UnavailableError(where))
