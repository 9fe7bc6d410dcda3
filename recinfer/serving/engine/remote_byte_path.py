"""Plain requests of a ranker, answered from their bytes and from the answers of shard servers.

recinfer.serving.engine.dispatcher has the counterpart for tables of this process. Unusual requests go to the decoded path.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

from recinfer.inference.byte_tables import AwaitedLookup, Rows
from recinfer.serving.engine.registry import RequestStats
from recinfer.serving.engine.request import Fill, PlainRequest, Request, answer_head
from recinfer.serving.engine.scheduler import Entry, Scheduler

__all__ = ["MOST_FAN_OUTS", "FanOuts"]

MOST_FAN_OUTS = 64
"""The most fan-outs that are under way together; further requests wait."""


class FanOuts:
    """Answers plain requests from shard servers, each with its own fan-out. Any thread may start a fan-out; its answers arrive
    on the thread of the shard servers' answers. The scheduler calls the methods of recinfer.serving.engine.scheduler.Runner.

    Args:
        scheduler: queues requests while too many fan-outs are under way.
        predict: queues the dense run of a prediction: its request, its parts, the function that writes its vectors,
            ``time.perf_counter()`` when the fan-out began, and ranks that gave no rows.
        stats: the server's counts.
        decode: answers a request in the decoded path.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        predict: Callable[[Request, PlainRequest, Fill, float, tuple[int, ...]], None],
        stats: RequestStats,
        decode: Callable[[Request], None],
    ) -> None:
        self._scheduler = scheduler
        self._predict = predict
        self._stats = stats
        self._decode = decode
        self._under_way = 0
        self._turn_ends = False  # whether a callback is scheduled for the end of a turn of the answers' thread
        self._lock = threading.Lock()

    def start(self, request: Request, plain: PlainRequest) -> None:
        """Begin the fan-out of a request, now or when fewer are under way."""
        self._scheduler.queue.admit(request.deadline)
        if self.can_start():
            self._begin(request, plain)
            return
        self._scheduler.submit(self, Entry(request, None, plain.batch, plain))

    # -- for the scheduler

    def can_start(self) -> bool:
        """Whether fewer than MOST_FAN_OUTS fan-outs are under way."""
        return self._under_way < MOST_FAN_OUTS

    def may_share(self, entry: Entry, samples: int) -> bool:
        """False: merging requests is more work than it saves."""
        return False

    def seconds(self, entry: Entry, samples: int, threads: int) -> float:
        """0: the shard servers do the work, so a fan-out begins on the calling thread."""
        return 0.0

    def run(self, entries: Sequence[Entry], threads: int) -> None:
        """Begin the fan-outs of ``entries``."""
        for entry in entries:
            self._begin(entry.request, entry.work)

    # -- a fan-out

    def _begin(self, request: Request, plain: PlainRequest) -> None:
        is_lookup = request.call == "Lookup"
        if not is_lookup and (
            not plain.can_predict() or plain.dense() is None
        ):  # checked before a shard server is called in vain
            self._decode(request)
            return
        start = time.perf_counter()
        with self._lock:
            self._under_way += 1
        self._scheduler.begin()
        lookup = plain.order
        assert isinstance(lookup, AwaitedLookup)
        answered = functools.partial(self._finish, request, plain, start)
        try:
            started = lookup.start(plain.bag_data, plain.bags, request.deadline, answered, request.trace())
        except Exception as error:  # a bug of recinfer: else its place would stay taken
            self._end_unstarted()
            request.reply(error)
            return
        if not started:
            self._end_unstarted()
            self._decode(request)

    def _end_unstarted(self) -> None:
        """Free the place of a fan-out that did not start."""
        with self._lock:
            self._under_way -= 1
        self._scheduler.done(0, 0, 0.0)

    def _finish(
        self,
        request: Request,
        plain: PlainRequest,
        start: float,
        rows: Rows | None,
        missing: tuple[int, ...],
        error: Exception | None,
    ) -> None:
        """Reply, or queue the dense run; called on the thread that has the rows, or where the lookup began."""
        with self._lock:
            self._under_way -= 1
        seconds = time.perf_counter() - start
        try:
            if rows is not None and request.call == "Predict":  # counted with its dense run
                self._scheduler.done(0, 0, seconds)
                self._predict(request, plain, rows.fill, start, missing)
            else:
                self._scheduler.done(1, plain.batch, seconds)
                if error is not None:
                    request.reply(error)
                elif rows is not None:
                    request.reply(self._joined(plain, rows, missing, start))
        except Exception as failed:  # without a reply the request would never end
            request.reply(failed)
        if self._scheduler.queue.waiting and not self._turn_ends:
            self._turn_ends = True
            assert isinstance(plain.order, AwaitedLookup)
            plain.order.at_end_of_turn(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_ends = False
        self._scheduler.run_ready()

    def _joined(self, plain: PlainRequest, rows: Rows, missing: tuple[int, ...], start: float) -> bytes:
        """The serialized answer to a lookup."""
        head = plain.head()
        if missing:
            head = answer_head(plain.order, plain.batch, plain.model.version, missing)
        joined = rows.after(head)
        plain.state.stages.add("lookup", time.perf_counter() - start)
        self._stats.batch.add(plain.batch)
        self._stats.stages.add("encode", 0.0)  # the join wrote the answer
        return joined
