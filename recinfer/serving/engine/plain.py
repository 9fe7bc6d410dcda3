"""Finds the parts of a plain request in its bytes, without a protobuf message.

A request is plain if the compiled reader accepts it, the model's only embedding module is pooled and unweighted, and the size
is within bounds. The decoded path answers all other requests, also those with errors, since it has the error messages.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import RecinferError
from recinfer.inference.byte_tables import PreparedLookup, ReadyLookup
from recinfer.inference.predictor import Predictor
from recinfer.quant.bags import BagPlaces
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.wire._wire import read_request
from recinfer.serving.wire.arrays import field_head, lookup_head
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb

__all__ = ["PlainReader", "PlainRequest", "answer_head"]

# Fewer samples run faster than a handoff to another thread takes.
_LEAST_PART = 64
_MOST_BYTES, _MOST_IDS, _MOST_FLOATS = 4 << 20, 1 << 18, 1 << 22


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
        """Write vectors of rows in this process, see recinfer.serving.engine.byte_path.Fill."""
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
