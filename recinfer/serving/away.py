"""Small, plain requests of a ranker, answered from their bytes and from what shards answer, without a queue.

As recinfer.serving.direct does where the rows are in this process: what is unusual gets None and goes the ordinary way.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.serving import codec
from recinfer.serving.direct import Direct, PlainRequest, lookup_head, run_dense

__all__ = ["Away", "AwayRequest"]


class AwayRequest(NamedTuple):
    """A request, and what each rank is asked for it."""

    request: PlainRequest
    parts: dict[int, Any]
    dense: NDArray[np.float32] | None


class Away:
    """Answers what it can, on the event loop.

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
        order, state, batch = request.order, request.state, request.batch
        answers, missing = await request.tables.find(asked.parts, batch, deadline)
        version = request.model.version
        into: Any
        if asked.dense is None:
            into = lookup_head(order, batch, version, missing) if missing else request.head()
        else:
            into = np.empty((batch, order.columns), np.float32)
        joined = request.tables.join(order, answers, request.data, request.lengths_at, request.keys, batch, into)
        state.stages.add("lookup", time.perf_counter() - start)
        if asked.dense is None:
            self._stats.batch.add(batch)
            self._stats.stages.add("encode", 0.0)  # the join wrote it
            return bytes(joined)
        arrays = [into]
        if state.num_dense:
            arrays.insert(0, asked.dense.reshape(batch, state.num_dense))
        outputs = run_dense(state, arrays, batch) if beside is None else await beside(run_dense, state, arrays, batch)
        if outputs is None:
            return None
        start = time.perf_counter()
        answer = codec.encode_output_arrays(state.output_names, outputs, version, missing)
        self._stats.stages.add("encode", time.perf_counter() - start)
        self._stats.batch.add(batch)
        return answer
