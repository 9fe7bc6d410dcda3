"""Finds the parts of a plain request in its bytes, without a protobuf message.

Plain is what the compiled reader accepts, for a model whose only embedding module is pooled and unweighted, up to bounds on
its size. The decoded path answers all other requests, also those with errors, since it has the error messages.
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
from recinfer.serving.wire import codec
from recinfer.serving.wire._wire import read_request
from recinfer.serving.wire.fields import field_head
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb

__all__ = ["PlainReader", "PlainRequest", "lookup_head"]

# Fewer samples run faster than a handoff to another thread takes.
_LEAST_PART = 64
_MOST_BYTES, _MOST_IDS, _MOST_FLOATS = 4 << 20, 1 << 18, 1 << 22


class RequestParts(NamedTuple):
    """Where the parts of a request lie in its bytes: RequestParts in ``wire/_wire.c``.

    Attributes:
        model, version: as the request names them; empty where it does not.
        dense_at, dense_bytes: where its dense inputs are, and their size.
        features: (bytes of the keys, fields of a BagPlaces); ``context``: the same, None where there is none.
    """

    model: str
    version: str
    dense_at: int
    dense_bytes: int
    features: tuple[bytes, tuple[Any, ...]]
    context: tuple[bytes, tuple[Any, ...]] | None


class PlainRequest(NamedTuple):
    """Where the parts of a request lie in ``data``, and what they are for.

    Attributes:
        order: the lookup of its keys.
        bag_data: the bytes in which the bags lie: ``data``, unless id steps changed the ids.
        bags: of the samples; ``context``: of what goes with all of them.
        dense_at, dense_bytes: where its dense inputs are, and their size.
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
        """See recinfer.serving.engine.byte_path.Fill; of rows in this process."""
        assert isinstance(self.order, ReadyLookup)
        return self.order.fill(into, self.bag_data, self.bags, part, self.context)

    def head(self) -> bytes:
        """All of its LookupResponse but the floats at the end."""
        order, key = self.order, (self.batch, self.model.version)
        found: bytes | None = order.heads[key]
        if found is None:
            found = order.heads[key] = lookup_head(order, *key)
        return found

    def can_predict(self) -> bool:
        """Whether it has all that a dense run takes, and the model's dense part runs on arrays."""
        state = self.state
        return self.order.complete and state.runs_on_arrays and self.dense_bytes == 4 * state.num_dense * self.batch

    def parts(self, threads: int) -> int:
        """In how many parts it is best run on so many threads that have nothing else to do."""
        return min(threads, self.batch // _LEAST_PART) or 1 if self.state.mergeable else 1

    def dense(self, first: int = 0, last: int | None = None) -> NDArray[np.float32] | None:
        """Dense inputs of its samples from ``first`` to before ``last``, flat; None when one of them is not finite, or all of
        them are too large for the sum to show it.
        """
        columns = self.state.num_dense
        samples = (self.batch if last is None else last) - first
        values = np.frombuffer(self.data, np.float32, samples * columns, self.dense_at + 4 * first * columns)
        # One sum sees every NaN and infinity. What is merely large is looked at twice, by the ordinary way. np.dot would
        # say on stderr that the sum overflows; vdot takes as long and says nothing.
        return values if math.isfinite(np.vdot(values, values)) else None


class PlainReader:
    """Reads requests. Any thread may call it.

    Args:
        registry: the models.
        limits: of requests; what is beyond them is not plain.
    """

    def __init__(self, registry: ModelRegistry, limits: Limits) -> None:
        self._registry, self._limits = registry, limits
        self._most_bytes = min(limits.max_message_bytes, _MOST_BYTES)
        self._most_ids = min(limits.max_ids, _MOST_IDS)
        self._most_floats = min(limits.max_response_bytes // 4, _MOST_FLOATS)

    def read(self, data: bytes) -> PlainRequest | None:
        """The plain request in ``data``; None for any other."""
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
    """The keys of a JaggedFeatures message that holds nothing else; none where they are no text."""
    try:
        return tuple(pb.JaggedFeatures.FromString(block).keys)
    except Exception:  # the decoded path reports the error
        return ()


def lookup_head(order: PreparedLookup, batch: int, version: str, missing: tuple[int, ...] = ()) -> bytes:
    """All of a LookupResponse but the floats at its end."""
    return codec.lookup_head(order.names, order.dims, batch, version, missing) + field_head(
        4, 4 * batch * order.columns
    )
