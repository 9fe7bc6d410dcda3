"""The output exchange of pooled tables: vectors are sent to the ranks of their examples and combined there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.exchange.combine import ColumnPlan, Sum, combine_sums
from recinfer.distributed.exchange.outputs import PooledEmbeddingsAllToAll, VariableBatchPooledEmbeddingsAllToAll
from recinfer.distributed.exchange.tensors import KJTAllToAllTensorsAwaitable
from recinfer.distributed.exchange.weights import WeightRoute, send_weights
from recinfer.distributed.tables.slots import ShardLayout
from recinfer.distributed.types import Awaitable, NoWait, QuantizedCommCodecs
from recinfer.distributed.types.shardings import BaseEmbeddingDist, EmbeddingShardingContext, Sent
from recinfer.errors import InputError
from recinfer.modules.embedding_modules import process_pooled_embeddings, reorder_inverse_indices
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["PooledContext", "ShardPooledDist", "keep_in_graph"]


@dataclass
class PooledContext(EmbeddingShardingContext):
    """Data of the input exchange that the output exchange of pooled tables needs.

    Args:
        divisors: 1 / bag length, ``[B of the feature]``, of each output that is divided after the exchange.
        sent_ids: number of ids that each slot sent, and the original positions of raw ids.
        inverse_indices: inverse indices of a variable batch, int64 ``[outputs, full batch]``, or None.
        sent_weights: the ids' weights in the order sent, when they have gradients.
        route: sizes and order of the ids' exchange.
        weights: the received weights, when they have gradients.
        pg: the ranks of the exchange; None when nothing is exchanged.
    """

    divisors: list[Tensor] = field(default_factory=list)
    sent_ids: Sent = field(default_factory=Sent)
    inverse_indices: Tensor | None = None
    sent_weights: Tensor | None = None
    route: WeightRoute | None = None
    weights: Tensor | None = None
    pg: dist.ProcessGroup | None = None

    def record_input(self, features: KeyedJaggedTensor, layout: ShardLayout) -> None:
        """Record divisors and inverse indices of this rank's input."""
        for i in layout.mean:
            lengths = features[layout.outputs[i][2]].lengths()
            self.divisors.append(1.0 / lengths.clamp(min=1).float())
        if features.variable_stride_per_key() and features.inverse_indices_or_none() is not None:
            self.inverse_indices = reorder_inverse_indices(
                features.inverse_indices(), [feature for _, _, feature in layout.outputs]
            )

    def sent(self, features: KeyedJaggedTensor, ids: Sent) -> None:
        """Record the sent ``features``, and their weights if these need gradients."""
        super().sent(features, ids)
        self.sent_ids = ids
        weights = features.weights_or_none()
        if weights is not None and weights.requires_grad and self.pg is not None:
            self.sent_weights = weights

    def received(self, features: KeyedJaggedTensor, awaitable: Any = None) -> None:
        """Record the received ``features``, and connect their weights to the sent weights if these have gradients."""
        super().received(features, awaitable)
        if self.pg is not None and self.pg.size() > 1 and isinstance(awaitable, KJTAllToAllTensorsAwaitable):
            self.route = WeightRoute.of(awaitable, features.lengths(), self.pg)
        if self.sent_weights is not None:
            self.connect_weights(features, self.sent_weights, features.weights())

    def connect_weights(self, features: KeyedJaggedTensor, sent: Tensor, received: Tensor | None) -> None:
        """Give ``features`` the weights ``sent``, with gradients; ``received`` is None when the weights have not been
        sent."""
        self.weights = sent if self.route is None else send_weights(sent, self.route, received)
        features._weights = self.weights

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""
        routed = (self.route.recat, self.route.lengths) if self.route is not None else ()
        for tensor in (
            *self.divisors,
            self.sent_ids.permute,
            self.inverse_indices,
            self.sent_weights,
            self.weights,
            *routed,
        ):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]


def keep_in_graph(local_embs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Let a rank without lookups take part in the backward of the exchange, and of the exchange of the ids' ``weights``."""
    if weights is not None and local_embs.numel() == 0:
        local_embs = local_embs + 0 * weights.sum()
    if torch.is_grad_enabled() and not local_embs.requires_grad:
        return local_embs.detach().requires_grad_()
    return local_embs


class ShardPooledDist(BaseEmbeddingDist[PooledContext, Tensor, Tensor]):
    """Sends pooled vectors to the ranks of their examples, and combines them.

    Args:
        layout: the slots.
        pg: the ranks; None for a world of one.
        device: device of the buffers.
        codecs: compress the data that is sent.
    """

    def __init__(
        self,
        layout: ShardLayout,
        pg: dist.ProcessGroup | None,
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._layout = layout
        widths = layout.widths_per_rank()
        self._fixed = PooledEmbeddingsAllToAll(pg, [sum(w) for w in widths], device, codecs=codecs) if pg else None
        self._variable = (
            VariableBatchPooledEmbeddingsAllToAll(pg, widths, device, callbacks=None, codecs=codecs) if pg else None
        )
        place = {output: n for n, output in enumerate(layout.mean)}
        self._outputs = [
            [Sum(tuple(slots), place.get(i)) for slots in columns] for i, columns in enumerate(layout.sums)
        ]
        self._columns = ColumnPlan(layout.widths, [each for sums in self._outputs for each in sums])

    def forward(self, local_embs: Tensor, sharding_ctx: PooledContext | None = None) -> Awaitable[Tensor]:
        """Start the exchange.

        Args:
            local_embs: ``[B of all ranks, local columns]``; with a variable batch one dimension, rank by rank.
            sharding_ctx: data of the input exchange.

        Returns:
            awaitable of ``[B, sum of dims]``, tables and their features in module order.

        Raises:
            InputError: a variable batch without inverse indices.
        """
        ctx = sharding_ctx if sharding_ctx is not None else PooledContext()
        local_embs = keep_in_graph(local_embs, ctx.weights)
        if ctx.variable_batch_per_feature:
            return self._variable_batch(local_embs, ctx)
        if self._fixed is None:
            return NoWait(self._columns(local_embs, ctx.divisors))
        awaitable = self._fixed(local_embs, ctx.batch_size_per_rank or None)
        awaitable.callbacks.append(lambda received: self._columns(received, ctx.divisors))
        return awaitable

    def _variable_batch(self, local_embs: Tensor, ctx: PooledContext) -> Awaitable[Tensor]:
        sizes = [b * w for b, w in zip(ctx.batch_size_per_feature_pre_a2a, self._layout.widths)]

        def combine(received: Tensor) -> Tensor:
            parts = [p.view(-1, w) for p, w in zip(received.split(sizes), self._layout.widths)]
            outputs = combine_sums(parts, self._outputs, ctx.divisors)
            return spread(outputs, ctx.inverse_indices)

        if self._variable is None:
            return NoWait(combine(local_embs))
        awaitable = self._variable(local_embs, ctx.batch_size_per_rank_per_feature, ctx.batch_size_per_feature_pre_a2a)
        awaitable.callbacks.append(combine)
        return awaitable


def spread(outputs: Sequence[Tensor], inverse_indices: Tensor | None) -> Tensor:
    """Expand outputs with separate batch sizes to the full batch, and concatenate them.

    Raises:
        InputError: unequal batch sizes and no inverse indices.
    """
    if inverse_indices is None and len({o.shape[0] for o in outputs}) > 1:
        raise InputError(
            f"features have batch sizes {[o.shape[0] for o in outputs]} and no inverse indices; pass inverse_indices "
            "with the row of every example"
        )
    return process_pooled_embeddings(list(outputs), torch.empty(0) if inverse_indices is None else inverse_indices)
