"""Small, plain requests of a ranker, answered from their bytes and from what shards answer, without a queue.

As recinfer.serving.direct does where the rows are in this process: what is unusual gets None and goes the ordinary way.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.serving import codec
from recinfer.serving.direct import Direct, PlainRequest, lookup_head, run_dense

if TYPE_CHECKING:
    from recinfer.serving.remote.fan import Answers

__all__ = ["Aside", "Away", "AwayRequest"]

Aside = Callable[[Callable[[], None]], object]
"""Runs what it is given, now or on another thread."""


class AwayRequest(NamedTuple):
    """A request, and what each rank is asked for it."""

    request: PlainRequest
    parts: dict[int, Any]
    dense: NDArray[np.float32] | None


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
        dense = None
        if call == "Predict" and (not request.can_predict() or (dense := request.dense()) is None):
            return None
        parts = request.tables.split(
            request.order, data, request.lengths_at, request.ids_at, request.ids, request.wide, request.batch
        )
        if parts is None:
            return None
        self._stats.stages.add("decode", time.perf_counter() - start)
        return AwayRequest(request, parts, dense)

    async def answer(
        self, asked: AwayRequest, deadline: float, beside: Callable[..., Awaitable[Any]] | None = None
    ) -> bytes | None:
        """The serialized answer; None when the ordinary way has to say what is wrong with its dense run.

        Args:
            deadline: ``time.monotonic()`` after which nobody waits for it.
            beside: runs the dense part beside the loop; None: on it.

        Raises:
            UnavailableError, DeadlineError: as recinfer.serving.remote.fanout.Fanout.find.
        """
        start = time.perf_counter()
        request = asked.request
        answers, missing = await request.tables.find(asked.parts, request.batch, deadline)
        found = self._join(asked, answers, missing, start)
        if asked.dense is None:
            return self._encoded(asked, found)
        outputs = self._run(asked, found) if beside is None else await beside(self._run, asked, found)
        return self._encoded_outputs(asked, outputs, missing)

    def answer_later(self, asked: AwayRequest, deadline: float, told: Callable[[Any], None], aside: Aside) -> bool:
        """The same without waiting; False: it has to be :meth:`answer`.

        Args:
            told: takes the answer, None as :meth:`answer` gives it, or an error; on a thread of gRPC's, or on the loop.
            aside: runs what takes long, on other threads than gRPC's.
        """
        start = time.perf_counter()
        request = asked.request

        def finish(answers: Answers, missing: tuple[int, ...]) -> None:
            try:
                found = self._join(asked, answers, missing, start)
                if asked.dense is None:
                    told(self._encoded(asked, found))
                else:
                    told(self._encoded_outputs(asked, self._run(asked, found), missing))
            except Exception as error:  # nobody else would hear of it
                told(error)

        def over(answers: Answers, missing: tuple[int, ...], error: Exception | None) -> None:
            if error is not None:
                told(error)
            elif asked.dense is not None:
                aside(functools.partial(finish, answers, missing))
            else:
                finish(answers, missing)

        return bool(request.tables.begin(asked.parts, request.batch, deadline, over))

    def _join(self, asked: AwayRequest, answers: Answers, missing: tuple[int, ...], start: float) -> Any:
        """A lookup's answer, or what a dense run takes, of the shards' answers."""
        request = asked.request
        order, state, batch, version = request.order, request.state, request.batch, request.model.version
        into: Any
        if asked.dense is None:
            into = lookup_head(order, batch, version, missing) if missing else request.head()
        else:
            into = np.empty((batch, order.columns), np.float32)
        joined = request.tables.join(order, answers, request.data, request.lengths_at, request.keys, batch, into)
        state.stages.add("lookup", time.perf_counter() - start)
        return joined if asked.dense is None else into

    def _encoded(self, asked: AwayRequest, joined: Any) -> bytes:
        self._stats.batch.add(asked.request.batch)
        self._stats.stages.add("encode", 0.0)  # the join wrote it
        return bytes(joined)

    def _run(self, asked: AwayRequest, looked_up: NDArray[np.float32]) -> list[NDArray[Any]] | None:
        state, batch = asked.request.state, asked.request.batch
        arrays = [looked_up]
        if state.num_dense:
            assert asked.dense is not None
            arrays.insert(0, asked.dense.reshape(batch, state.num_dense))
        return run_dense(state, arrays, batch)

    def _encoded_outputs(
        self, asked: AwayRequest, outputs: list[NDArray[Any]] | None, missing: tuple[int, ...]
    ) -> bytes | None:
        if outputs is None:
            return None
        start = time.perf_counter()
        request = asked.request
        answer = codec.encode_output_arrays(request.state.output_names, outputs, request.model.version, missing)
        self._stats.stages.add("encode", time.perf_counter() - start)
        self._stats.batch.add(request.batch)
        return answer
