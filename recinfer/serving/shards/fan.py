"""One request's calls to shards on the event loop: the least busy replica of each rank, another where one is slow or gone."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from recinfer.errors import DeadlineError, OverloadedError, RecinferError, UnavailableError
from recinfer.serving.shards.messages import Parts, decode_response, join_request
from recinfer.serving.shards.replica import Replica

if TYPE_CHECKING:
    from recinfer.serving.shards.fanout import Fanout

__all__ = ["Answers", "Ask", "CallFailed", "Fan", "Try", "choose", "given", "hedge_delay"]

_FIRST_HEDGE_S = 0.05  # until enough answers were timed
_LEAST_HEDGE_S = 1e-3
_GIVE_UP, _LEAST_GIVE_UP_S = 20, 0.25
_RETRIES = 1

Answers = dict[int, list[NDArray[Any]]]
"""What each rank gave."""


class CallFailed(Exception):
    """A call to a shard that ended without an answer; ``code`` is the name of its gRPC status."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Timer(Protocol):
    """A callback that waits for its time."""

    def cancel(self) -> None:
        """Do not call it, and hold nothing of it."""


class Ask:
    """What is asked for one request.

    Args:
        version: key of the version that all ranks are asked for.
        batch: its samples.
        parts: rank -> its parts of the message.
        deadline: ``time.monotonic()``.
        half: vectors come as float16.
        stored: rows may come as they are stored.
        default_rows: whether the version's manifest allows default rows where nobody answers.
    """

    __slots__ = ("batch", "deadline", "default_rows", "half", "parts", "stored", "version")

    def __init__(
        self,
        version: str,
        batch: int,
        parts: Mapping[int, Parts],
        deadline: float,
        *,
        half: bool,
        stored: bool,
        default_rows: bool,
    ) -> None:
        self.version, self.batch, self.parts, self.deadline = version, batch, parts, deadline
        self.half, self.stored, self.default_rows = half, stored, default_rows

    def message(self, ranks: Iterable[int]) -> tuple[bytes, int]:
        """The request to who has ``ranks``, and the number of its parts."""
        parts = [part for rank in ranks for part in self.parts[rank]]
        return join_request(self.version, self.batch, parts, half=self.half, stored=self.stored), len(parts)

    def arrays(self, each: Try, data: bytes) -> list[NDArray[Any]]:
        """What ``each`` was answered; raises RecinferError where it is no answer to that."""
        arrays = decode_response(data, self.half)
        if len(arrays) != each.count:
            raise RecinferError(f"shard {each.replica.target} answered {len(arrays)} parts of {each.count}")
        return arrays

    def by_rank(self, each: Try, arrays: list[NDArray[Any]]) -> Answers:
        """The same for each rank that ``each`` was for."""
        if len(each.ranks) == 1:
            return {each.ranks[0]: arrays}
        found, at = {}, 0
        for rank in each.ranks:
            count = len(self.parts[rank])
            found[rank] = arrays[at : at + count]
            at += count
        return found


class Try:
    """One call to one replica for some ranks."""

    __slots__ = ("cancel", "count", "hedge", "over", "ranks", "replica", "since", "timer")

    def __init__(self, replica: Replica, ranks: tuple[int, ...], hedge: bool = False) -> None:
        self.replica, self.ranks, self.hedge = replica, ranks, hedge
        self.since = time.monotonic()
        self.cancel: Callable[[], object] | None = None
        self.count = 0  # parts that it was sent
        self.timer: Timer | None = None
        self.over = False

    def end(self) -> None:
        """It is over: nothing holds its request, or the answer, any more."""
        self.over, self.cancel = True, None
        if self.timer is not None:
            self.timer.cancel()


def choose(
    replicas: Sequence[Replica], version: str, chosen: Mapping[Replica, Any], asked: Sequence[Replica], turn: int
) -> Replica | None:
    """The one of a rank's replicas to ask, of those that were not ``asked``; None: there is none.

    Args:
        chosen: those that will be asked for other ranks.
        turn: of equals another one each time, else all rankers that are hardly busy would ask the first that is listed.
    """
    if len(replicas) == 1:
        return replicas[0] if replicas[0] not in asked and replicas[0].usable(version) else None
    best: Replica | None = None
    least: Any = None
    now = time.monotonic()
    first = turn % len(replicas) if replicas else 0
    for replica in (*replicas[first:], *replicas[:first]):
        if replica in asked or not replica.usable(version):
            continue
        load = replica.load(now)
        if replica in chosen and not load[0]:
            return replica  # it is asked for another rank anyway
        if least is None or load < least:
            best, least = replica, load
    return best


def hedge_delay(p95: float) -> float:
    """Seconds after which an answer is late, where 95 % come within ``p95``; nan: that is not known yet."""
    return _FIRST_HEDGE_S if math.isnan(p95) else max(_LEAST_HEDGE_S, p95)


class Fan:
    """The calls of one request. Everything happens on the event loop.

    Attributes:
        answers: of the ranks that have answered; ``missing``: those that nobody answers for, by permission.
    """

    def __init__(self, fanout: Fanout, ask: Ask) -> None:
        self._fanout, self._pool, self._of = fanout, fanout.pool, ask
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._tries: list[Try] = []
        self._asked: dict[int, list[Replica]] = {rank: [] for rank in ask.parts}
        self._retried: dict[int, int] = {}
        self.answers: Answers = {}
        self.missing: tuple[int, ...] = ()

    async def run(self) -> None:
        """Ask all ranks; return once each has answered, or is missing by permission."""
        self._ask(tuple(self._of.parts))
        await self.done()

    async def done(self) -> None:
        """The same for who has been asked already."""
        await self._done  # each call has the deadline, and gRPC ends it then

    def take_over(self, tries: Sequence[Try], answers: Answers) -> None:
        """Go on with calls that others made; their ends are told to :meth:`ended`."""
        self._tries.extend(tries)
        self.answers.update(answers)
        for each in tries:
            for rank in each.ranks:
                self._asked[rank].append(each.replica)

    def cancel(self) -> None:
        """End what is still under way."""
        for each in self._tries:
            self._end(each)

    def _too_late(self) -> None:
        ranks = ", ".join(str(rank) for rank in self._of.parts if rank not in self.answers)
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
            replica = choose(
                self._pool.replicas(rank), self._of.version, chosen, self._asked[rank], self._fanout.turn()
            )
            if replica is None:
                lost.append(rank)
            else:
                chosen.setdefault(replica, []).append(rank)
        for replica, mine in chosen.items():
            self._send(replica, tuple(mine), hedge)
        if lost and not hedge:
            self._lose(lost)
        return not lost

    def _send(self, replica: Replica, ranks: tuple[int, ...], hedge: bool) -> None:
        each = Try(replica, ranks, hedge)
        self._tries.append(each)
        for rank in ranks:
            self._asked[rank].append(replica)
        self._fanout.sent(each)
        if not hedge and self._fanout.has_choice(ranks):
            delay = hedge_delay(self._fanout.pace(each.ranks[0], self._of.batch).p95)
            each.timer = self._loop.call_later(delay, self.slow, each, delay)
        self._call(each)

    def slow(self, each: Try, delay: float) -> None:
        """It takes longer than 95 % of the others."""
        if each.over or self._done.done():
            return
        left = tuple(rank for rank in each.ranks if rank not in self.answers)
        if left and self._others(left) and self._fanout.spend():
            self._ask(left, hedge=True)
            return
        give_up = max(_LEAST_GIVE_UP_S, _GIVE_UP * delay)
        each.timer = self._loop.call_later(max(0.0, each.since + give_up - time.monotonic()), self._very_slow, each)

    def _very_slow(self, each: Try) -> None:
        """It takes so long that the host may be gone without a word: ask another one, budget or not."""
        left = tuple(rank for rank in each.ranks if rank not in self.answers)
        if not each.over and not self._done.done() and left and self._others(left):
            self._fanout.count("retried")
            self._ask(left, hedge=True)

    def _others(self, ranks: Sequence[int]) -> bool:
        """Whether each of ``ranks`` has a replica that was not asked."""
        return all(
            any(r not in self._asked[rank] and r.usable(self._of.version) for r in self._pool.replicas(rank))
            for rank in ranks
        )

    # -- what comes back ---------------------------------------------------------------------------------------------

    def _call(self, each: Try) -> None:
        """Send the request of one try."""
        try:
            request, each.count = self._of.message(each.ranks)
            each.cancel = each.replica.quick.ask(request, self._of.deadline, functools.partial(self._hear, each))
            if each.cancel is None:
                self._hear(each, None, "CANCELLED", "the connection was closed")
        except Exception as error:  # the channel is closed
            self._stop(each)
            self._fail(error)

    def _hear(self, each: Try, data: bytes | None, code: str, details: str) -> None:
        """On any thread."""
        self._loop.call_soon_threadsafe(self.ended, each, functools.partial(given, data, code, details))

    def ended(self, each: Try, result: Callable[[], bytes]) -> None:
        """A call is over; ``result`` gives its answer, or raises CallFailed."""
        if each.over:
            return
        try:
            arrays = self._of.arrays(each, result())
        except CallFailed as error:
            self._stop(each)
            self._failed(each, error.code, error.details)
        except RecinferError as error:  # a malformed answer: the fault of the shard, so another replica is asked
            self._stop(each)
            self._failed(each, "UNAVAILABLE", f"its answer is malformed: {error}")
        except Exception as error:  # ours: nobody else would hear of it
            self._stop(each)
            self._fail(error)
        else:
            self._stop(each)
            self._answered(each, arrays)

    def _stop(self, each: Try) -> None:
        each.end()
        each.replica.ended()

    def _end(self, each: Try) -> None:
        """Cancel a call whose answer nobody needs."""
        if not each.over:
            cancel = each.cancel
            self._stop(each)
            if cancel is not None:
                cancel()

    def _answered(self, each: Try, arrays: list[NDArray[Any]]) -> None:
        now = time.monotonic()
        each.replica.answered(now - each.since)
        won = False
        for rank, mine in self._of.by_rank(each, arrays).items():
            if rank not in self.answers:
                self.answers[rank] = mine
                won = True
        first = next((t for t in self._tries if not t.hedge and each.ranks[0] in t.ranks), each)
        self._fanout.timed(each, self._of.batch, now - first.since)
        if each.hedge and won:
            self._fanout.count("hedge_won")
        for other in self._tries:
            if not other.over and all(rank in self.answers for rank in other.ranks):
                if won and other.since < each.since:
                    other.replica.was_slow(now - other.since)
                self._end(other)
        self._look()

    def _look(self) -> None:
        if len(self.answers) + len(self.missing) == len(self._of.parts) and not self._done.done():
            self._done.set_result(None)

    def _failed(self, each: Try, code: str, details: str) -> None:
        if self._done.done():
            return
        left = [rank for rank in each.ranks if rank not in self.answers and not self._is_asked(rank)]
        if code == "FAILED_PRECONDITION":
            self._fanout.count("not_prepared")
            each.replica.lacks(self._of.version)
            self._ask(left)
        elif code in ("UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED"):
            self._fanout.count("failed")
            if code == "RESOURCE_EXHAUSTED":
                each.replica.why = details
            else:
                each.replica.failed(f"{code}: {details[:200]}")
            self._retry(left, code, details)
        elif code == "DEADLINE_EXCEEDED":
            self._too_late()
        else:
            self._fail(RecinferError(f"shard {each.replica.target} failed: {code}: {details}"))

    def _is_asked(self, rank: int) -> bool:
        """Whether somebody may still answer for ``rank``."""
        return any(not each.over and rank in each.ranks for each in self._tries)

    def _retry(self, ranks: Sequence[int], code: str, details: str) -> None:
        again = [rank for rank in ranks if self._retried.get(rank, 0) < _RETRIES]
        self._retried.update({rank: self._retried.get(rank, 0) + 1 for rank in again})
        if again:
            self._fanout.count("retried")
            self._ask(again)
        lost = [rank for rank in ranks if rank not in again]
        if lost and code == "RESOURCE_EXHAUSTED":
            self._fail(OverloadedError(f"rank {lost[0]}: {details}"))
        elif lost:
            self._lose(lost)

    def _lose(self, ranks: Sequence[int]) -> None:
        """Nobody can be asked for ``ranks``."""
        if self._of.default_rows and self._fanout.gives_default_rows:
            self._fanout.lost(ranks)
            self.missing = (*self.missing, *ranks)
            self._look()
            return
        version = self._of.version
        where = "; ".join(f"rank {rank} has no living replica: {self._pool.addresses(rank, version)}" for rank in ranks)
        if self._fanout.missing == "default_rows":
            where += "; shards.json asks for default rows, but the archive's manifest does not allow them"
        self._fail(UnavailableError(where))


def given(data: bytes | None, code: str, details: str) -> bytes:
    """What a call gave that ended so; raises CallFailed."""
    if data is None:
        raise CallFailed(code, details)
    return data
