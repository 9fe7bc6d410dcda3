"""Plain requests of a ranker, answered from their bytes and from what shards answer, without a queue.

As recinfer.serving.engine.byte_path does where the rows are in this process: what is unusual gets None and goes the ordinary way.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.serving.engine.byte_path import Direct, PlainRequest, lookup_head
from recinfer.serving.engine.parallel_parts import SideBySide

if TYPE_CHECKING:
    from recinfer.serving.shards.fan_out_request import Answers

__all__ = ["Aside", "Away", "AwayRequest", "Told"]

Aside = Callable[[Callable[[], None]], object]
"""Runs what it is given, now or on another thread."""

Told = Callable[["bytes | Exception | None", float], None]
"""Takes an answer, an error, or None when the ordinary way has to answer; and the seconds of processor that its dense part
took, 0 where nobody measured them.
"""


class AwayRequest(NamedTuple):
    """A request, what each rank is asked for it, and whether a dense run follows."""

    request: PlainRequest
    parts: dict[int, Any]
    predicts: bool


class Away:
    """Answers what it can, on any thread.

    Args:
        direct: reads requests; its counters count these too.
    """

    def __init__(self, direct: Direct) -> None:
        self._direct, self._stats = direct, direct.stats

    def begin(self, call: str, data: bytes) -> AwayRequest | None:
        """What to ask for a serialized LookupRequest or PredictRequest; None when the ordinary way has to answer."""
        start = time.perf_counter()
        request = self._direct.read(data, away=True)
        if request is None:
            return None
        predicts = call == "Predict"
        if predicts and (not request.can_predict() or request.dense() is None):  # before anybody is asked in vain
            return None
        parts = request.tables.split(
            request.order, data, request.lengths_at, request.ids_at, request.ids, request.wide, request.batch
        )
        if parts is None:
            return None
        self._stats.stages.add("decode", time.perf_counter() - start)
        return AwayRequest(request, parts, predicts)

    async def answer(
        self,
        asked: AwayRequest,
        deadline: float,
        aside: Callable[..., Awaitable[Any]] | None = None,
        beside: SideBySide | None = None,
    ) -> bytes | None:
        """The serialized answer; None when the ordinary way has to say what is wrong with its dense run.

        Args:
            deadline: ``time.monotonic()`` after which nobody waits for it.
            aside: runs the dense part beside the loop; None: on it.
            beside: see :meth:`Direct.predict_in_parts`.

        Raises:
            UnavailableError, DeadlineError: as recinfer.serving.shards.fan_out.FanOut.begin.
        """
        start = time.perf_counter()
        answers, missing = await asked.request.tables.find(asked.parts, asked.request.batch, deadline)
        finish = functools.partial(self._finish, asked, answers, missing, start, beside)
        return (finish() if aside is None or not asked.predicts else await aside(finish))[0]

    def answer_later(
        self, asked: AwayRequest, deadline: float, told: Told, aside: Aside, beside: SideBySide | None = None
    ) -> None:
        """The same without waiting.

        Args:
            told: hears of it on the shards' thread, or where ``aside`` runs the dense part.
            aside: runs the dense part.
        """
        start = time.perf_counter()

        def finish(answers: Answers, missing: tuple[int, ...]) -> None:
            try:
                found = self._finish(asked, answers, missing, start, beside)
            except Exception as error:  # nobody else would hear of it
                told(error, 0.0)
            else:
                told(*found)

        def over(answers: Answers, missing: tuple[int, ...], error: Exception | None) -> None:
            if error is not None:
                told(error, 0.0)
            elif asked.predicts:
                aside(functools.partial(finish, answers, missing))
            else:
                finish(answers, missing)

        asked.request.tables.begin(asked.parts, asked.request.batch, deadline, over)

    def _finish(
        self,
        asked: AwayRequest,
        answers: Answers,
        missing: tuple[int, ...],
        start: float,
        beside: SideBySide | None,
    ) -> tuple[bytes | None, float]:
        """The answer of what the shards gave, as :data:`Told` takes it."""
        request, begun = asked.request, time.thread_time()
        if not asked.predicts:
            return self._joined(request, answers, missing, start), 0.0
        found = np.empty((request.batch, request.order.columns), np.float32)
        self._join(request, answers, found)

        def look_up(first: int, last: int) -> NDArray[np.float32]:
            return found[first:last]

        answer, elsewhere = self._direct.predict_in_parts(request, look_up, beside, start, missing)
        return answer, time.thread_time() - begun + elsewhere

    def _joined(self, request: PlainRequest, answers: Answers, missing: tuple[int, ...], start: float) -> bytes:
        """The answer to a lookup."""
        head = request.head()
        if missing:
            head = lookup_head(request.order, request.batch, request.model.version, missing)
        joined = bytes(self._join(request, answers, head))
        request.state.stages.add("lookup", time.perf_counter() - start)
        self._stats.stages.add("encode", 0.0)  # the join wrote it
        self._stats.batch.add(request.batch)
        return joined

    def _join(self, request: PlainRequest, answers: Answers, into: bytes | NDArray[np.float32]) -> Any:
        data, lengths_at, keys, batch = request.data, request.lengths_at, request.keys, request.batch
        return request.tables.join(request.order, answers, data, lengths_at, keys, batch, into)
