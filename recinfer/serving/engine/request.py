"""A request on its way through the engine: its call, bytes, deadline and reply; and the parts of a plain one in its bytes.

A request is plain if the compiled reader accepts it, the model's only embedding module is pooled and unweighted, and the size
is within bounds. The decoded path answers all other requests, also those with errors, since it has the error messages.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import RecinferError
from recinfer.inference.byte_tables import PreparedLookup, ReadyLookup
from recinfer.inference.predictor import Predictor
from recinfer.quant.bags import BagPlaces
from recinfer.serving.engine.memory_budget import UNCOUNTED, Ticket
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.wire._wire import read_request
from recinfer.serving.wire.arrays import field_head, lookup_head
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.tracing import Fields, no_trace

__all__ = [
    "AnswerCall",
    "CallName",
    "Fill",
    "PlainReader",
    "PlainRequest",
    "Reply",
    "Request",
    "answer_head",
    "served_of_task",
    "trace_of_task",
]

# Fewer samples run faster than a handoff to another thread takes.
_LEAST_PART = 64
_MOST_BYTES, _MOST_IDS, _MOST_FLOATS = 4 << 20, 1 << 18, 1 << 22

served_of_task: ContextVar[ServedModel | None] = ContextVar("served_of_task", default=None)
"""The version that the call of this task got, for counts and the log; None: the call names nothing served. The handler of a
call clears it, since the calls of one HTTP connection share a task."""

trace_of_task: ContextVar[Fields] = ContextVar("trace_of_task", default=no_trace)
"""The trace of the call of this task, for shard servers."""

CallName = Literal["Lookup", "Predict"]

AnswerCall = Callable[[CallName, bytes], Awaitable[bytes]]
"""Answers a serialized request on the event loop; raises RecinferErrors."""

Reply = Callable[["bytes | Exception"], None]
"""Takes a serialized answer or an error; called on any thread."""


class Request:
    """The form to which every protocol converts a call, for :meth:`recinfer.serving.engine.dispatcher.Dispatcher.dispatch`.

    Args:
        call: the method.
        data: a serialized recinfer.v1 LookupRequest or PredictRequest, whatever the protocol.
        deadline: ``time.monotonic()`` after which the caller no longer waits.
        reply: called once with the answer; not called if the request was dropped before.
        waits: called on any thread, at most once, when the request has to wait for a thread, so that its protocol may watch
            for a disconnection of the client.
        ticket: the bytes of the memory budget that the call holds.
        trace: returns the trace of the call, which a ranker sends on to its shard servers.

    Attributes:
        served: the version that answers, once it is known; None too for a request that names nothing served.
    """

    __slots__ = ("_reply", "call", "data", "deadline", "served", "ticket", "trace", "waits")

    def __init__(
        self,
        call: CallName,
        data: bytes,
        deadline: float,
        reply: Reply,
        waits: Callable[[], None] | None = None,
        ticket: Ticket = UNCOUNTED,
        trace: Fields = no_trace,
    ) -> None:
        self.call = call
        self.data = data
        self.deadline = deadline
        self.waits = waits
        self.ticket = ticket
        self.trace = trace
        self.served: ServedModel | None = None
        self._reply: Reply | None = reply

    def chose(self, model: ServedModel) -> None:
        """Note the version that answers."""
        self.served = model

    def reply(self, answer: bytes | Exception) -> None:
        """Send the answer; only the first call counts."""
        reply, self._reply = self._reply, None
        self.waits = None  # ``waits`` may refer to this request: a cycle would hold memory until a garbage collection
        if reply is not None:
            reply(answer)

    def drop(self) -> None:
        """Drop the reply: the client no longer waits for it."""
        self._reply = self.waits = None


Fill = Callable[[NDArray[np.float32], "tuple[int, int] | None"], bool]
"""Writes pooled vectors, float32 ``[samples, columns]``, for all samples (None), or for ``count`` samples from ``first``
(``(first, count)``); returns False where the decoded path has to answer."""


class RequestParts(NamedTuple):
    """Offsets of the parts of a request in its bytes: RequestParts in ``wire/_wire.c``.

    Attributes:
        model, version: names in the request, or empty.
        dense_at, dense_bytes: offset and size of its dense inputs, in bytes.
        features: (bytes of the keys, fields of a BagPlaces); ``context``: the same, or None.
    """

    model: str
    version: str
    dense_at: int
    dense_bytes: int
    features: tuple[bytes, tuple[Any, ...]]
    context: tuple[bytes, tuple[Any, ...]] | None


class PlainRequest(NamedTuple):
    """A plain request: offsets of its parts in ``data``, and the version and tables that answer it.

    Attributes:
        order: the prepared lookup of the request's keys.
        bag_data: the bytes in which the bags lie: ``data``, unless id steps changed the ids.
        bags: places of the samples' ids; ``context``: places of the ids that go with all samples.
        dense_at, dense_bytes: offset and size of its dense inputs, in bytes.
    """

    data: bytes
    model: ServedModel
    state: Predictor
    order: PreparedLookup
    bag_data: bytes
    bags: BagPlaces
    dense_at: int
    dense_bytes: int
    context: BagPlaces | None = None

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.bags.batch

    def fill(self, into: NDArray[np.float32], part: tuple[int, int] | None) -> bool:
        """Write vectors of rows in this process, see :data:`Fill`."""
        assert isinstance(self.order, ReadyLookup)
        return self.order.fill(into, self.bag_data, self.bags, part, self.context)

    def head(self) -> bytes:
        """The request's LookupResponse without the floats at the end."""
        order, key = self.order, (self.batch, self.model.version)
        found: bytes | None = order.heads[key]
        if found is None:
            found = order.heads[key] = answer_head(order, *key)
        return found

    def can_predict(self) -> bool:
        """Whether the request has all inputs of the dense part, and the dense part runs on arrays."""
        state = self.state
        return self.order.complete and state.runs_on_arrays and self.dense_bytes == 4 * state.num_dense * self.batch

    def parts(self, threads: int) -> int:
        """The best number of parts for a run on ``threads`` idle threads."""
        return min(threads, self.batch // _LEAST_PART) or 1 if self.state.mergeable else 1

    def dense(self, first: int = 0, last: int | None = None) -> NDArray[np.float32] | None:
        """Dense inputs of the samples from ``first`` to before ``last``, flat; None if a number is not finite, or if the sum of
        their squares overflows.
        """
        columns = self.state.num_dense
        samples = (self.batch if last is None else last) - first
        values = np.frombuffer(self.data, np.float32, samples * columns, self.dense_at + 4 * first * columns)
        # One sum shows every NaN and infinity. Numbers that are merely large are checked again in the decoded path.
        # np.dot would report an overflow of the sum on stderr; vdot takes as long and reports nothing.
        return values if math.isfinite(np.vdot(values, values)) else None


class PlainReader:
    """Reads plain requests. Any thread may call it.

    Args:
        registry: the models.
        limits: limits of requests; a request beyond them is not plain.
    """

    def __init__(self, registry: ModelRegistry, limits: Limits) -> None:
        self._registry = registry
        self._limits = limits
        self._most_bytes = min(limits.max_message_bytes, _MOST_BYTES)
        self._most_ids = min(limits.max_ids, _MOST_IDS)
        self._most_floats = min(limits.max_response_bytes // 4, _MOST_FLOATS)

    def read(self, data: bytes) -> PlainRequest | None:
        """The plain request in ``data``; None for any other request."""
        if len(data) > self._most_bytes or (found := read_request(data)) is None:
            return None
        parts = RequestParts._make(found)
        block, places = parts.features
        bags, context = BagPlaces._make(places), None
        if bags.ids > self._most_ids or bags.batch > self._limits.max_batch or bags.keys > self._limits.max_keys:
            return None
        try:
            model = self._registry.get(parts.model, parts.version)
        except RecinferError:
            return None
        state = model.predictor.state
        tables = state.byte_tables
        if tables is None:
            return None
        if parts.context is None:
            order = tables.order(block) or tables.learn(block, _keys(block))
        else:
            context_block, context_places = parts.context
            blocks, context = (block, context_block), BagPlaces._make(context_places)
            all_ids, all_keys = bags.ids + context.ids, bags.keys + context.keys
            if not tables.takes_context or all_ids > self._most_ids or all_keys > self._limits.max_keys:
                return None
            order = tables.order(blocks) or tables.learn(blocks, *map(_keys, blocks))
        if order is None or bags.batch * order.columns > self._most_floats:
            return None
        bag_data = data
        if state.intake.steps.in_bytes:
            given = [(order.keys[0], bags)] if context is None else list(zip(order.keys, (bags, context)))
            if (rewritten := state.intake.steps.rewrite(data, given)) is None:
                return None
            bag_data, (bags, *beside) = rewritten
            context = beside[0] if beside else None
        return PlainRequest(data, model, state, order, bag_data, bags, parts.dense_at, parts.dense_bytes, context)


def _keys(block: bytes) -> tuple[str, ...]:
    """The keys of a JaggedFeatures message that holds only keys; empty if the message is malformed."""
    try:
        return tuple(pb.JaggedFeatures.FromString(block).keys)
    except Exception:  # the decoded path reports the error
        return ()


def answer_head(order: PreparedLookup, batch: int, version: str, missing: tuple[int, ...] = ()) -> bytes:
    """A serialized LookupResponse without the floats at its end."""
    return lookup_head(order.names, order.dims, batch, version, missing) + field_head(4, 4 * batch * order.columns)
