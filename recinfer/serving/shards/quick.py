"""One request's calls to shards without the event loop: gRPC's threads send them, and take the answers.

That is how it goes as long as nothing is unusual. A call that fails, or is late where another replica could be asked, brings
the whole request to the loop, where a :class:`~recinfer.serving.shards.fan.Fan` takes over what is under way.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from recinfer.serving.shards.fan import Answers, Ask, Fan, Try, choose, given, hedge_delay
from recinfer.serving.shards.replica import Replica

if TYPE_CHECKING:
    from recinfer.serving.shards.fanout import Fanout

__all__ = ["Lookout", "QuickFan", "Told"]

Told = Callable[[Answers, tuple[int, ...], "Exception | None"], None]
"""Takes what each rank gave, the ranks that nobody answered for, and what went wrong; once, on any thread."""


class QuickFan:
    """The calls of one request; ``told`` hears how they ended."""

    __slots__ = (
        "_answers",
        "_fan",
        "_fanout",
        "_follows",
        "_left",
        "_lock",
        "_moved",
        "_of",
        "_over",
        "_told",
        "_tries",
    )

    def __init__(self, fanout: Fanout, ask: Ask, told: Told) -> None:
        self._fanout, self._of, self._told = fanout, ask, told
        self._lock = threading.RLock()  # held while calls are begun: none of them ends before all are
        self._tries: list[Try] = []
        self._answers: Answers = {}
        self._left = 0
        self._over = self._moved = False
        self._fan: Fan | None = None
        self._follows: asyncio.Task[None] | None = None

    def begin(self) -> bool:
        """Ask all ranks. False: nobody is there for one of them, and nothing was asked."""
        chosen: dict[Replica, list[int]] = {}
        fanout, version = self._fanout, self._of.version
        for rank in self._of.parts:
            replica = choose(fanout.pool.replicas(rank), version, chosen, (), fanout.turn())
            if replica is None or replica.quick is None:
                return False
            chosen.setdefault(replica, []).append(rank)
        self._tries = [Try(replica, tuple(ranks)) for replica, ranks in chosen.items()]
        self._left = len(self._tries)
        with self._lock:
            for each in self._tries:
                self._call(each)
            for each in self._tries:
                if fanout.has_choice(each.ranks):
                    delay = hedge_delay(fanout.pace(each.ranks[0], self._of.batch).p95)
                    each.timer = fanout.lookout.tell(each.since + delay, functools.partial(self._slow, each, delay))
        return True

    def _call(self, each: Try) -> None:
        request, each.count = self._of.message(each.ranks)
        replica = each.replica
        self._fanout.sent(each)
        assert replica.quick is not None
        told = functools.partial(self._ended, each)
        try:
            each.cancel = replica.quick.ask(request, self._of.deadline, told)
        except Exception as error:  # ours: the other calls go on, and somebody waits for them
            told(None, "INTERNAL", f"it cannot be asked: {error}")
            return
        if each.cancel is None:
            told(None, "CANCELLED", "the connection was closed")

    def _ended(self, each: Try, data: bytes | None, code: str, details: str) -> None:
        """A call is over; mostly on its channel's thread."""
        with self._lock:
            if each.over:  # another one was the first to answer
                return
            if not self._moved and data is not None:
                try:
                    self._answers.update(self._of.by_rank(each, self._of.arrays(each, data)))
                except Exception:
                    pass  # the Fan that takes over reads the answer again, and ends this try with the error
                else:
                    self._left -= 1
                    is_last = self._over = not self._left
                    each.end()
            # What is told to the loop is heard there in this order.
            if not each.over:
                self._move()
                self._fanout.loop.call_soon_threadsafe(self._pass_on, each, data, code, details)
                return
        spent = time.monotonic() - each.since
        each.replica.ended()
        each.replica.answered(spent)
        self._fanout.timed(each, self._of.batch, spent)
        if is_last:
            self._told(self._answers, (), None)

    # -- to the loop, and on it --------------------------------------------------------------------------------------

    def _move(self) -> None:
        if not self._moved:
            self._moved = True
            self._fanout.loop.call_soon_threadsafe(self._take_over)

    def _slow(self, each: Try, delay: float) -> None:
        """On the loop: its answer is late."""
        with self._lock:
            if self._over or each.over:
                return
            self._move()
            self._fanout.loop.call_soon(self._is_slow, each, delay)

    def _is_slow(self, each: Try, delay: float) -> None:
        assert self._fan is not None
        self._fan.slow(each, delay)

    def _take_over(self) -> None:
        with self._lock:  # all calls have begun
            pass
        self._fan = Fan(self._fanout, self._of)
        self._fan.take_over(self._tries, self._answers)
        self._follows = self._fanout.loop.create_task(self._follow(self._fan))

    def _pass_on(self, each: Try, data: bytes | None, code: str, details: str) -> None:
        assert self._fan is not None
        self._fan.ended(each, functools.partial(given, data, code, details))

    async def _follow(self, fan: Fan) -> None:
        error: Exception | None = None
        try:
            await fan.done()
        except Exception as found:
            error = found
        finally:
            fan.cancel()
        self._told(fan.answers, fan.missing, error)


class _Due:
    """A callback that waits in a :class:`Lookout`. Once cancelled, nothing of its request is held."""

    __slots__ = ("_late",)

    def __init__(self, late: Callable[[], None]) -> None:
        self._late: Callable[[], None] | None = late

    def cancel(self) -> None:
        """Do not call it; any thread."""
        self._late = None

    def call(self) -> None:
        """Call it, unless it was cancelled."""
        late = self._late
        if late is not None:
            late()


class Lookout:
    """Calls what is due, on the loop. One timer for all: most of what is told to it is over long before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._due: list[tuple[float, int, _Due]] = []
        self._number = itertools.count()
        self._next: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, at: float, late: Callable[[], None]) -> _Due:
        """Call ``late`` at ``time.monotonic()`` of about ``at``, unless what is returned is cancelled; from any thread."""
        due = _Due(late)
        with self._lock:
            heapq.heappush(self._due, (at, next(self._number), due))
            if self._next is not None and self._next <= at:
                return due
            self._next = at
        self._loop.call_soon_threadsafe(self._set)
        return due

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._next = self._due[0][0] if self._due else None
        if self._next is not None:
            self._timer = self._loop.call_later(max(0.0, self._next - time.monotonic()), self._look)

    def _look(self) -> None:
        now, due = time.monotonic(), []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                due.append(heapq.heappop(self._due)[2])
        self._set()
        for each in due:
            each.call()
