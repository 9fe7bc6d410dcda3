"""Small, plain requests answered from their bytes, without a queue, a protobuf message or a tensor on the way.

Everything else (weights, unpooled tables, errors) gets None here and goes the ordinary way, which knows what to
say; so the two ways may not differ in any answer, and tests hold them to that, to the byte.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import RecinferError
from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.parallel_parts import SideBySide
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.stats import RequestStats
from recinfer.serving.wire import codec
from recinfer.serving.wire._wire import read_request
from recinfer.serving.wire.fields import bytes_field
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb

__all__ = ["AWAY_BYTES", "DIRECT_BYTES", "Direct", "LookUp", "PlainRequest", "lookup_head"]

DIRECT_BYTES = 128 << 10
"""Longer requests are not looked at while others wait."""
AWAY_BYTES = 4 << 20
"""The same where rows are on other hosts: what is done here then takes Python's lock, on whatever thread, and the ordinary way
takes it for longer."""

# Of a part of a prediction: fewer samples are sooner run than handed to another thread.
_LEAST_PART = 64
_OTHER_SHARE = 0.8  # of a thread's part of a request, what the other threads than the caller's get

# What is more than this takes longer than a loop that others wait for should be held.
_MOST_IDS, _MOST_FLOATS = 8192, 1 << 19
_MOST_ANSWERED = 1 << 18  # floats of an answer that is written where small requests wait for it
# What a thread that nobody waits for but the caller may be given.
_LARGE_BYTES, _LARGE_IDS, _LARGE_FLOATS = 1 << 20, 1 << 16, 1 << 21
# What goes to other hosts.
_AWAY_IDS, _AWAY_FLOATS = 1 << 18, 1 << 22

LookUp = Callable[[int, int], NDArray[np.float32] | None]
"""Rows of the samples from one to before another, what a dense run takes; None when the ordinary way has to answer."""


class PlainRequest(NamedTuple):
    """Where the parts of a request lie in ``data``, and what they are for.

    Attributes:
        tables: DirectTables, or recinfer.serving.shards.remote_tables.RemoteTables; ``order``: of theirs.
    """

    data: bytes
    model: ServedModel
    state: Predictor
    tables: Any
    order: Any
    keys: int
    batch: int
    lengths_at: int
    ids_at: int
    ids: int
    wide: bool
    dense_at: int
    dense_bytes: int
    context: tuple[int, int, int, bool, int] | None = None
    """Of the context: where lengths and ids are, how many ids, whether they are 64 bits wide, how many keys."""

    def pool(self, into: bytes | NDArray[np.float32], part: tuple[int, int] | None = None) -> Any:
        """See DirectTables.pool."""
        return self.tables.pool(
            self.order,
            self.data,
            self.lengths_at,
            self.ids_at,
            self.ids,
            self.wide,
            self.keys,
            self.batch,
            into,
            part,
            self.context,
        )

    def head(self) -> bytes:
        """All of its LookupResponse but the floats at the end."""
        order, key = self.order, (self.batch, self.model.version)
        found: bytes | None = order.heads[key]
        if found is None:
            found = order.heads[key] = lookup_head(order, *key)
        return found

    def can_predict(self) -> bool:
        """Whether it has what a dense run on the CPU takes."""
        state = self.state
        return self.order.complete and state.runs_on_arrays and self.dense_bytes == 4 * state.num_dense * self.batch

    def parts(self, threads: int) -> int:
        """In how many parts it is best run on so many threads that have nothing else to do."""
        return min(threads, self.batch // _LEAST_PART) or 1 if self.state.mergeable else 1

    def dense(self, first: int = 0, last: int | None = None) -> NDArray[np.float32] | None:
        """Dense inputs of its samples from ``first`` to before ``last``, flat; None when one of them is not finite, or all of
        them are too large to tell.
        """
        columns = self.state.num_dense
        samples = (self.batch if last is None else last) - first
        values = np.frombuffer(self.data, np.float32, samples * columns, self.dense_at + 4 * first * columns)
        # One sum sees every NaN and infinity. What is merely large is looked at twice, by the ordinary way. np.dot would
        # say on stderr that the sum overflows; vdot takes as long and says nothing.
        return values if math.isfinite(np.vdot(values, values)) else None


class Direct:
    """Answers what it can.

    Args:
        registry, limits, stats: the service's.
    """

    def __init__(self, registry: ModelRegistry, limits: Limits, stats: RequestStats) -> None:
        self._registry, self._limits, self.stats = registry, limits, stats
        self._most = (
            min(limits.max_message_bytes, DIRECT_BYTES),
            min(limits.max_ids, _MOST_IDS),
            min(limits.max_response_bytes // 4, _MOST_FLOATS),
        )
        self._most_of_large = (
            min(limits.max_message_bytes, _LARGE_BYTES),
            min(limits.max_ids, _LARGE_IDS),
            min(limits.max_response_bytes // 4, _LARGE_FLOATS),
        )
        self._most_away = (
            min(limits.max_message_bytes, AWAY_BYTES),
            min(limits.max_ids, _AWAY_IDS),
            min(limits.max_response_bytes // 4, _AWAY_FLOATS),
        )

    def lookup(self, data: bytes) -> tuple[bytes, int] | None:
        """The serialized answer to a LookupRequest and its samples; None when the ordinary way has to answer."""
        start = time.perf_counter()
        request = self.read(data)
        if request is None or request.context is not None:  # which a LookupRequest knows nothing of
            return None
        if request.batch * request.order.columns > _MOST_ANSWERED:
            return None
        batch, head = request.batch, request.head()
        decoded = time.perf_counter()
        answer = request.pool(head)
        if answer is None:
            return None
        found = time.perf_counter()
        self.stats.stages.add("decode", decoded - start)
        self.stats.batch.add(batch)
        request.state.stages.add("lookup", found - decoded)
        self.stats.stages.add("encode", 0.0)  # the lookup wrote it
        return answer, batch

    def predict(self, data: bytes) -> tuple[bytes, int] | None:
        """The serialized answer to a PredictRequest and its samples; None when the ordinary way has to answer."""
        start = time.perf_counter()
        request = self.read(data)
        if request is None or not request.can_predict():
            return None
        self.stats.stages.add("decode", time.perf_counter() - start)
        answers: list[bytes | None] = [None]
        self._run([(0, request)], answers)
        if answers[0] is None:
            return None
        self.stats.batch.add(request.batch)
        return answers[0], request.batch

    def predict_alone(
        self, request: PlainRequest, beside: SideBySide, decode_s: float = 0.0
    ) -> tuple[bytes | None, float]:
        """The answer to a prediction that has the machine to itself, in parts side by side where that pays.

        Args:
            request: one that can predict.
            decode_s: seconds that reading it took.

        Returns:
            as :meth:`predict_in_parts`.
        """

        def look_up(first: int, last: int) -> NDArray[np.float32] | None:
            pooled = np.empty((last - first, request.order.columns), np.float32)
            return pooled if request.pool(pooled, (first, last - first)) else None

        found = self.predict_in_parts(request, look_up, beside, time.perf_counter())
        self.stats.stages.add("decode", decode_s)
        return found

    def predict_in_parts(
        self,
        request: PlainRequest,
        look_up: LookUp,
        beside: SideBySide | None,
        since: float,
        missing: tuple[int, ...] = (),
    ) -> tuple[bytes | None, float]:
        """The answer to a prediction whose rows ``look_up`` gives, cut by samples where that pays.

        Args:
            request: one that can predict.
            beside: threads for its parts that have nothing else to do; None: this one has to do.
            since: ``time.perf_counter()`` when its lookup began.
            missing: ranks that gave no rows.

        Returns:
            the serialized answer, None when the ordinary way has to give it; and the seconds of processor that other
            threads than the caller's spent on it.
        """
        state, parts = request.state, 1 if beside is None else request.parts(beside.threads)

        def run(first: int, last: int) -> tuple[float, list[NDArray[Any]] | None]:
            looked_up = look_up(first, last)
            if looked_up is None or (values := request.dense(first, last)) is None:
                return 0.0, None
            arrays = [looked_up]
            if state.num_dense:
                arrays.insert(0, values.reshape(last - first, state.num_dense))
            return time.perf_counter(), _run_dense(state, arrays, last - first, counted=False)

        # The caller has begun when the others still wake up, and what they do last is waited for: so its part is larger.
        each = int(request.batch * _OTHER_SHARE / parts)
        ends = [request.batch - each * other for other in range(parts - 1, -1, -1)]
        works = [functools.partial(run, *span) for span in itertools.pairwise([0, *ends])]
        given, elsewhere = ([works[0]()], 0.0) if beside is None else beside.run(works)
        outputs = [outputs for _, outputs in given if outputs is not None]
        if len(outputs) < parts:
            return None, elsewhere
        end = time.perf_counter()
        joined = outputs[0] if parts == 1 else [np.concatenate(pieces) for pieces in zip(*outputs, strict=True)]
        if _has_nan(joined):
            return None, elsewhere
        answer = codec.encode_output_arrays(state.output_names, joined, request.model.version, missing)
        state.stages.add("lookup", given[0][0] - since)
        state.stages.add("dense", end - given[0][0])
        self.stats.stages.add("encode", time.perf_counter() - end)
        self.stats.batch.add(request.batch)
        return answer, elsewhere

    def samples(self, data: bytes) -> int | None:
        """Of a request that may be answered here; None: it will not be. Other reasons may stand against it yet."""
        if len(data) > self._most_of_large[0] or (found := read_request(data)) is None:
            return None
        batch: int = found[4][3]
        return batch if 0 < batch <= self._limits.max_batch else None

    def predict_many(self, messages: Sequence[bytes], max_batch: int) -> list[bytes | None]:
        """Serialized answers to PredictRequests, run together by model; None where the ordinary way has to answer.

        Args:
            max_batch: samples in a run.
        """
        answers: list[bytes | None] = [None] * len(messages)
        runs: list[list[tuple[int, PlainRequest]]] = []
        open_runs: dict[int, tuple[list[tuple[int, PlainRequest]], int]] = {}
        for at, data in enumerate(messages):
            start = time.perf_counter()
            request = self.read(data, large=True)
            if request is None or not request.can_predict():
                continue
            self.stats.stages.add("decode", time.perf_counter() - start)
            key = id(request.state)
            run, samples = open_runs.get(key, ([], 0))
            if not run or samples + request.batch > max_batch or not request.state.mergeable:
                run, samples = [], 0
                runs.append(run)
            run.append((at, request))
            open_runs[key] = run, samples + request.batch
        for run in runs:
            self._run(run, answers)
            for at, request in run:
                if answers[at] is not None:
                    self.stats.batch.add(request.batch)
        return answers

    def read(self, data: bytes, *, away: bool = False, large: bool = False) -> PlainRequest | None:
        """What ``data`` asks of tables in this process, or of those that are ``away``; None for what is not plain.

        Args:
            large: it may take longer than others should be kept waiting.
        """
        most_bytes, most_ids, most_floats = self._most_away if away else self._most_of_large if large else self._most
        if len(data) > most_bytes or (found := read_request(data)) is None:
            return None
        name, version, dense_at, dense_bytes, features, beside = found
        keys_at, keys_end, keys, batch, lengths_at, ids_at, ids, wide = features
        if ids > most_ids or batch > self._limits.max_batch or keys > self._limits.max_keys:
            return None
        try:
            model = self._registry.get(name, version)
        except RecinferError:
            return None
        state = model.predictor.state
        tables = state.away if away else state.direct
        if tables is None:
            return None
        block, context = data[keys_at:keys_end], None
        if beside is None:
            order = tables.order(block) or tables.learn(block, _keys(block))
        else:
            beside_at, beside_end, beside_keys, _, *places = beside
            if away or ids + places[2] > most_ids or keys + beside_keys > self._limits.max_keys:
                return None
            blocks = block, data[beside_at:beside_end]
            order = tables.order(blocks) or tables.learn(blocks, *map(_keys, blocks))
            context = *places, beside_keys
        if order is None or batch * order.columns > most_floats:
            return None
        return PlainRequest(
            data,
            model,
            state,
            tables,
            order,
            keys,
            batch,
            lengths_at,
            ids_at,
            ids,
            wide,
            dense_at,
            dense_bytes,
            context,
        )

    def _run(self, run: Sequence[tuple[int, PlainRequest]], answers: list[bytes | None]) -> None:
        """Answer requests of one state together; those whose ids or numbers are not right stay without an answer."""
        state, columns = run[0][1].state, run[0][1].order.columns
        start = time.perf_counter()
        pooled = np.empty((sum(request.batch for _, request in run), columns), np.float32)
        dense, taken, end = [], [], 0
        for at, request in run:
            first, last = end, end + request.batch
            values = request.dense()
            if values is None or not request.pool(pooled[first:last]):
                continue
            dense.append(values)
            taken.append((at, request, first, last))
            end = last
        if not taken:
            return
        arrays = [pooled[:end]]
        if state.num_dense:
            joined = dense[0] if len(dense) == 1 else np.concatenate(dense)
            arrays.insert(0, joined.reshape(end, state.num_dense))
        found = time.perf_counter()
        state.stages.add("lookup", found - start)
        outputs = _run_dense(state, arrays, end)
        if outputs is None:
            return
        start = time.perf_counter()
        odd = _has_nan(outputs)
        for at, request, first, last in taken:
            mine = outputs if len(taken) == 1 else [output[first:last] for output in outputs]
            if odd and _has_nan(mine):
                continue
            answers[at] = codec.encode_output_arrays(state.output_names, mine, request.model.version)
        self.stats.stages.add("encode", time.perf_counter() - start)


def _keys(block: bytes) -> tuple[str, ...]:
    """The keys of a JaggedFeatures message that holds nothing else; none where they are no text."""
    try:
        return tuple(pb.JaggedFeatures.FromString(block).keys)
    except Exception:  # the ordinary way says what is wrong
        return ()


def _run_dense(
    state: Predictor, arrays: Sequence[NDArray[Any]], batch: int, *, counted: bool = True
) -> list[NDArray[Any]] | None:
    """The dense program's outputs for ``batch`` samples; None when it fails: the ordinary way does so too, and is told.

    Args:
        counted: in the state's figures.
    """
    try:
        outputs = state.run_engine_arrays(arrays, counted=counted)
    except Exception:
        return None
    if any(not output.ndim or output.shape[0] != batch or output.dtype != np.float32 for output in outputs):
        return None
    return outputs


def _has_nan(outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether there is a NaN, which the ordinary way answers with an error."""
    # Squares are never negative, so their sum is NaN only where one of them is; it may well be infinite. See PlainRequest.dense.
    return any(math.isnan(np.vdot(output, output)) for output in outputs)


def lookup_head(order: Any, batch: int, version: str, missing: tuple[int, ...] = ()) -> bytes:
    """All of a LookupResponse but the floats at its end."""
    head = codec.lookup_head(order.names, order.dims, batch, version, missing)
    return head + bytes_field(4, bytes(4 * batch * order.columns))[0]
