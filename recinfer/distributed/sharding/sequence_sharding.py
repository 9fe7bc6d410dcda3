"""The output exchange of unpooled tables: every id's row goes home and back into the order of the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.dist_data import SequenceEmbeddingsAllToAll
from recinfer.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from recinfer.distributed.sharding.features import Sent
from recinfer.distributed.sharding.layout import ShardLayout
from recinfer.distributed.sharding.pooled import keep_in_graph
from recinfer.distributed.types import Awaitable, NoWait, QuantizedCommCodecs
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["SequenceShardingContext", "ShardSequenceDist"]


@dataclass
class SequenceShardingContext(EmbeddingShardingContext):
    """What the output exchange of unpooled tables needs to know of the input exchange.

    Args:
        features_before_input_dist: the input.
        input_splits: ids that this rank sent to each rank.
        output_splits: ids that it got from each rank.
        sparse_features_recat: the order of the (rank, feature) pieces that made the features received.
        unbucketize_permute_tensor: where each id of the cut features went.
        lengths_after_input_dist: lengths of the features received.
        sent_ids: how many ids each slot sent, and where they came from.
    """

    features_before_input_dist: KeyedJaggedTensor | None = None
    input_splits: list[int] = field(default_factory=list)
    output_splits: list[int] = field(default_factory=list)
    sparse_features_recat: Tensor | None = None
    unbucketize_permute_tensor: Tensor | None = None
    lengths_after_input_dist: Tensor | None = None
    sent_ids: Sent = field(default_factory=Sent)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` is done with them."""
        if self.features_before_input_dist is not None:
            self.features_before_input_dist.record_stream(stream)  # type: ignore[arg-type]
        for tensor in (self.sparse_features_recat, self.sent_ids.permute, self.lengths_after_input_dist):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]

    def sizes_known(self, awaitable: Any) -> None:
        """Note how many ids go where."""
        super().sizes_known(awaitable)
        labels = getattr(awaitable, "_labels", None)
        if labels is not None:
            values = labels.index("values")
            self.input_splits = list(awaitable._input_splits[values])
            self.output_splits = list(awaitable._output_splits[values])
            self.sparse_features_recat = awaitable._recat

    def received(self, features: KeyedJaggedTensor) -> None:
        """Note what came in."""
        super().received(features)
        self.lengths_after_input_dist = features.lengths()
        self.unbucketize_permute_tensor = self.sent_ids.permute


class ShardSequenceDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, list[Tensor]]):
    """Sends every id's row back to the rank of the id.

    Args:
        layout: the slots, all of one width.
        pg: the ranks; None for a world of one.
        device: where buffers lie.
        codecs: shrink what is sent.
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
        self._width = layout.widths[0] if layout.widths else 0
        self._dist = SequenceEmbeddingsAllToAll(pg, layout.slots_per_rank, device, codecs) if pg is not None else None

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[list[Tensor]]:
        """Start the exchange.

        Args:
            local_embs: ``[ids received, columns]``, by feature, in it by rank.
            sharding_ctx: what was sent and what came.

        Returns:
            awaitable of one ``[ids, columns]`` for each column piece of each output, in module order.
        """
        assert sharding_ctx is not None
        ctx = sharding_ctx
        local_embs = keep_in_graph(local_embs.view(-1, self._width))
        if self._dist is None:
            return _Ordered(NoWait(local_embs), self._layout, ctx.sent_ids)
        assert ctx.lengths_after_input_dist is not None
        awaitable = self._dist(
            local_embs,
            lengths=ctx.lengths_after_input_dist,
            input_splits=ctx.input_splits,
            output_splits=ctx.output_splits,
            unbucketize_permute_tensor=None,  # slots of several sorts came together; they are put in order here
            batch_size_per_rank=ctx.batch_size_per_rank,
            sparse_features_recat=ctx.sparse_features_recat,
        )
        return _Ordered(awaitable, self._layout, ctx.sent_ids)


class _Ordered(Awaitable[list[Tensor]]):
    """Rows in the order sent -> rows of each column piece of each output, in the order of its ids."""

    def __init__(self, rows: Awaitable[Tensor], layout: ShardLayout, sent: Sent) -> None:
        super().__init__()
        self._rows = rows
        self._layout = layout
        self._sent = sent

    def _wait_impl(self) -> list[Tensor]:
        rows_ND = self._rows.wait()
        starts = [0, *accumulate(self._sent.sizes)]
        pieces = rows_ND.split(self._sent.sizes)
        return [
            pieces[slots[0]] if len(slots) == 1 else self._unbucketize(rows_ND, starts, slots)
            for columns in self._layout.sums
            for slots in columns
        ]

    def _unbucketize(self, rows_ND: Tensor, starts: Sequence[int], slots: Sequence[int]) -> Tensor:
        raise NotImplementedError
