"""A single fan-out: its messages to replicas, hedges for late answers, retries after failures, and its end."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from recinfer.errors import DeadlineError, InputError, OverloadedError, RecinferError, UnavailableError
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.messages import Answers, Parts, decode_failure, decode_response, join_request, trace_field
from recinfer.serving.shards.replica import Replica
from recinfer.serving.shards.transport import rankers_thread

__all__ = ["FanOutCallback", "FanOutRequest", "Fits", "ShardQuery", "begin_fan_out"]

_FIRST_HEDGE_S = 0.05  # until enough answers were timed
_LEAST_HEDGE_S = 1e-3
_GIVE_UP, _LEAST_GIVE_UP_S = (
    20,
    0.25,
)  # a replica counts as lost after 20 times the hedge's delay, but not before 0.25 s
_RETRIES = 1  # retries of a rank, on another replica
_FULL_S = 0.01  # after which a client may call again when shard servers are full
_log = logging.getLogger(__name__)

FanOutCallback = Callable[[Answers, tuple[int, ...], "Exception | None"], object]
"""Takes the arrays of each rank, the ranks that default rows stand for, and the error or None."""

Fits = Callable[[int, list[NDArray[Any]]], bool]
"""Whether arrays have the sizes of a rank's answer to its parts."""


def choose(
    replicas: Sequence[Replica], version: str, chosen: Mapping[Replica, Any], tried: Sequence[Replica], turn: int
) -> Replica | None:
    """The replica of a rank to call, among the usable replicas that were not ``tried``; None: there is none.

    Args:
        chosen: replicas that will be called for other ranks.
        turn: rotates the choice among equal replicas: idle rankers would else all call the replica that is listed first.
    """
    if len(replicas) == 1:
        return replicas[0] if replicas[0] not in tried and replicas[0].usable(version) else None
    best: Replica | None = None
    least: Any = None
    now = time.monotonic()
    first = turn % len(replicas) if replicas else 0
    for replica in (*replicas[first:], *replicas[:first]):
        if replica in tried or not replica.usable(version):
            continue
        load = replica.load(now)
        if replica in chosen and not load[0]:
            return replica  # another rank's message goes to this replica anyway
        if least is None or load < least:
            best, least = replica, load
    return best


def _hedge_delay(p95: float) -> float:
    """Seconds after which an answer is late, if 95 % of the answers take up to ``p95`` seconds."""
    return _FIRST_HEDGE_S if math.isnan(p95) else max(_LEAST_HEDGE_S, p95)


@dataclass(frozen=True, slots=True)
class ShardQuery:
    """A lookup for all ranks.

    Attributes:
        version: key of the version in which all ranks look up.
        batch: number of samples.
        parts: rank -> its parts of the message.
        deadline: a time of ``time.monotonic()``; infinite: the settings' timeout counts.
        default_rows: whether the version's manifest allows default rows for a rank without an answer; the settings may
            forbid them.
        fits: checks each rank's answer; an answer that does not fit counts as failed.
        trace: headers of the request's trace, which the messages carry.
    """

    version: str
    batch: int
    parts: Mapping[int, Parts]
    deadline: float
    default_rows: bool
    fits: Fits
    trace: Mapping[str, str] = field(default_factory=dict)


class _Attempt:
    """One message to one replica, for some ranks."""

    __slots__ = ("forget", "is_hedge", "is_over", "num_parts", "ranks", "replica", "since", "timer")

    def __init__(self, replica: Replica, ranks: tuple[int, ...], is_hedge: bool) -> None:
        self.replica = replica
        self.ranks = ranks
        self.is_hedge = is_hedge
        self.since = time.monotonic()
        self.num_parts = 0
        self.timer: Any = None
        self.forget: Callable[[], object] | None = None
        self.is_over = False

    def end(self) -> None:
        """End the attempt: stop its timer, and free its request and answer."""
        if not self.is_over:
            self.is_over = True
            self.replica.outstanding -= 1
            if self.timer is not None:
                self.timer.cancel()
            if self.forget is not None:
                self.forget()


class _Refused(Exception):
    """A shard server's response that reports an error; ``code`` is the name of a gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FanOutRequest:
    """A fan-out under way. All its methods run on the transport's thread."""

    def __init__(self, fan_out: FanOut, query: ShardQuery, done: FanOutCallback) -> None:
        self._fan_out = fan_out
        self._pool = fan_out.pool
        self._query = query
        self._done = done
        self._deadline = min(query.deadline, time.monotonic() + fan_out.pool.config.settings.timeout_seconds)
        self._loop = rankers_thread().loop
        self._attempts: list[_Attempt] = []
        self._tried: dict[int, list[Replica]] = {rank: [] for rank in query.parts}
        self._retried: Counter[int] = Counter()
        self._full: dict[int, str] = {}  # messages of full replicas by rank
        self._answers: Answers = {}
        self._missing: tuple[int, ...] = ()
        self._is_over = False
        self._trace = trace_field(query.trace)

    def begin(self) -> None:
        """Send all ranks their parts."""
        try:
            self._send_ranks(tuple(self._query.parts))
            self._finish_if_whole()
        except Exception as error:  # a bug of recinfer: else the request would never end
            self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        for attempt in self._attempts:
            attempt.end()
        try:
            self._done(self._answers, self._missing, error)
        except Exception:
            _log.exception("what the shards answered was lost")

    def _finish_if_whole(self) -> None:
        if len(self._answers) + len(self._missing) == len(self._query.parts):
            self._finish(None)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send_ranks(self, ranks: Sequence[int], *, hedge: bool = False) -> None:
        """Send the parts of ``ranks`` to replicas that were not called for them yet, one message per replica."""
        chosen: dict[Replica, list[int]] = {}
        lost = []
        for rank in ranks:
            replicas, turn = self._pool.replicas(rank), self._fan_out.next_turn()
            replica = choose(replicas, self._query.version, chosen, self._tried[rank], turn)
            if replica is None:
                lost.append(rank)
            else:
                chosen.setdefault(replica, []).append(rank)
        if lost and not hedge:
            self._end_without_replica(lost)
        if not self._is_over:
            for replica, mine in chosen.items():
                self._send(_Attempt(replica, tuple(mine), hedge))

    def _send(self, attempt: _Attempt) -> None:
        query, fan_out, replica = self._query, self._fan_out, attempt.replica
        parts = [part for rank in attempt.ranks for part in query.parts[rank]]
        message = join_request(query.version, query.batch, parts, self._trace)
        attempt.num_parts = len(parts)
        self._attempts.append(attempt)
        for rank in attempt.ranks:
            self._tried[rank].append(replica)
        replica.outstanding += 1
        fan_out.calls["hedged" if attempt.is_hedge else "sent"] += 1
        if not attempt.is_hedge:
            fan_out.earn_hedge()
            if fan_out.has_choice(attempt.ranks):
                delay = _hedge_delay(fan_out.times(attempt.ranks[0], query.batch).p95)
                attempt.timer = self._loop.call_later(delay, self._on_late, attempt, delay)
        attempt.forget = replica.call(message, self._deadline, functools.partial(self._on_end, attempt))

    def _on_late(self, attempt: _Attempt, delay: float) -> None:
        """Hedge an attempt that takes longer than 95 % of the others, or schedule ``_on_very_late``."""
        left = self._left(attempt)
        if left and self._fan_out.spend_hedge():
            self._send_ranks(left, hedge=True)
            return
        give_up = max(_LEAST_GIVE_UP_S, _GIVE_UP * delay)
        wait = max(0.0, attempt.since + give_up - time.monotonic())
        attempt.timer = self._loop.call_later(wait, self._on_very_late, attempt)

    def _on_very_late(self, attempt: _Attempt) -> None:
        """Call another replica regardless of the hedge budget: the attempt's host may be lost without notice."""
        left = self._left(attempt)
        if left:
            self._fan_out.calls["retried"] += 1
            self._send_ranks(left, hedge=True)

    def _left(self, attempt: _Attempt) -> tuple[int, ...]:
        """The unanswered ranks of ``attempt`` if each has a usable replica that was not called, else ()."""
        left = tuple(rank for rank in attempt.ranks if rank not in self._answers)
        version = self._query.version
        can = all(
            any(r not in self._tried[rank] and r.usable(version) for r in self._pool.replicas(rank)) for rank in left
        )
        return left if can else ()

    # -- responses ---------------------------------------------------------------------------------------------------

    def _on_end(self, attempt: _Attempt, data: bytes | bytearray | None, code: str, details: str) -> None:
        """Handle the response (``data``) or the failure of an attempt."""
        if attempt.is_over:
            return
        attempt.end()
        try:
            if data is None:
                self._handle_failure(attempt, code, details)
            else:
                self._take(attempt, data)
            self._finish_if_whole()
        except Exception as error:  # a bug of recinfer: else the request would never end
            self._finish(error)

    def _take(self, attempt: _Attempt, data: bytes | bytearray) -> None:
        try:
            answers = self._read(attempt, data)
        except _Refused as refused:
            self._handle_failure(attempt, refused.code, str(refused))
        except RecinferError as error:  # a fault of the shard server, so another replica is called
            self._handle_failure(attempt, "UNAVAILABLE", f"its answer is malformed: {error}")
        else:
            self._accept(attempt, answers)

    def _read(self, attempt: _Attempt, data: bytes | bytearray) -> Answers:
        """The arrays of each rank of an attempt; raises RecinferError if ``data`` is no answer to the attempt."""
        failure = decode_failure(data)
        if failure is not None:
            raise _Refused(*failure)
        arrays = decode_response(data)
        if len(arrays) != attempt.num_parts:
            raise InputError(f"it has {len(arrays)} parts, expected {attempt.num_parts}")
        found: Answers = {}
        at = 0
        for rank in attempt.ranks:
            count = len(self._query.parts[rank])
            found[rank] = arrays[at : at + count]
            at += count
            if not self._query.fits(rank, found[rank]):
                sizes = ", ".join(str(array.nbytes) for array in found[rank])
                raise InputError(
                    f"{sizes} bytes are not the rows of rank {rank} for {self._query.batch} samples; ranker and shard must "
                    "have the same plan"
                )
        return found

    def _accept(self, attempt: _Attempt, answers: Answers) -> None:
        now = time.monotonic()
        attempt.replica.answered(now - attempt.since)
        new = {rank: mine for rank, mine in answers.items() if rank not in self._answers}
        self._answers |= new
        first = attempt
        if attempt.is_hedge:
            first = next((t for t in self._attempts if not t.is_hedge and attempt.ranks[0] in t.ranks), attempt)
            self._fan_out.calls["hedge_won"] += bool(new)
        self._fan_out.times(attempt.ranks[0], self._query.batch).add(now - first.since)
        for other in self._attempts:
            if not other.is_over and all(rank in self._answers for rank in other.ranks):
                if new and other.since < attempt.since:
                    other.replica.was_slow(now - other.since)
                other.end()

    def _handle_failure(self, attempt: _Attempt, code: str, details: str) -> None:
        fan_out, replica = self._fan_out, attempt.replica
        left = [rank for rank in attempt.ranks if rank not in self._answers and not self._is_under_way(rank)]
        if code == "FAILED_PRECONDITION":
            fan_out.calls["not_prepared"] += 1
            replica.lacks(self._query.version)
            self._send_ranks(left)
        elif code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            fan_out.calls["failed"] += 1
            if code == "RESOURCE_EXHAUSTED":
                self._full.update(dict.fromkeys(left, details))
            else:
                replica.failed(f"{code}: {details[:200]}")
            self._retry(left)
        elif code == "DEADLINE_EXCEEDED":
            self._end_at_deadline()
        elif code == "INVALID_ARGUMENT":
            self._finish(InputError(f"shard {replica.target}: {details}"))
        else:
            self._finish(RecinferError(f"shard {replica.target} failed: {code}: {details}"))

    def _is_under_way(self, rank: int) -> bool:
        """Whether a replica may still answer for ``rank``."""
        return any(not attempt.is_over and rank in attempt.ranks for attempt in self._attempts)

    def _end_at_deadline(self) -> None:
        ranks = ", ".join(str(rank) for rank in self._query.parts if rank not in self._answers)
        for attempt in self._attempts:
            if not attempt.is_over:
                attempt.replica.was_slow(time.monotonic() - attempt.since)
        self._finish(DeadlineError(f"the deadline passed before rank {ranks} had answered"))

    def _retry(self, ranks: Sequence[int]) -> None:
        again = [rank for rank in ranks if self._retried[rank] < _RETRIES]
        self._retried.update(again)
        if again:
            self._fan_out.calls["retried"] += 1
            self._send_ranks(again)
        lost = [rank for rank in ranks if rank not in again]
        if lost:
            self._end_without_replica(lost)

    def _end_without_replica(self, ranks: Sequence[int]) -> None:
        """Use default rows for ``ranks``, which have no replica left, if allowed; else end the request with an error."""
        if self._query.default_rows and self._fan_out.gives_default_rows:
            self._fan_out.default_rows.update(ranks)
            self._missing = (*self._missing, *ranks)
            return
        full = [rank for rank in ranks if rank in self._full]
        if full:
            self._finish(OverloadedError(f"rank {full[0]}: {self._full[full[0]]}", retry_after=_FULL_S))
            return
        version = self._query.version
        where = "; ".join(f"rank {rank} has no living replica: {self._pool.addresses(rank, version)}" for rank in ranks)
        if self._fan_out.missing == "default_rows":
            where += "; shards.json requests default rows, but the archive's manifest does not allow them"
        self._finish(UnavailableError(where))


def begin_fan_out(fan_out: FanOut, query: ShardQuery, done: FanOutCallback) -> None:
    """Get each rank's arrays for its parts from the least busy replica, or from another if this one is late or fails.

    Any thread may call this; the request itself runs on the transport's thread.

    Args:
        done: called once, on the transport's thread, which it must not block. Its error is an UnavailableError (a rank has
            no usable replica, and default rows are not allowed, or forbidden), a DeadlineError, an OverloadedError, or
            the InputError of a shard server that refuses the request.
    """
    rankers_thread().call(FanOutRequest(fan_out, query, done).begin)
