"""The output exchange of unpooled tables: rows are sent to the ranks of their ids and put into the ids' order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.comm.collectives import alltoall_sequence
from recinfer.distributed.exchange.pooled import keep_in_graph
from recinfer.distributed.exchange.tensors import KJTAllToAllTensorsAwaitable
from recinfer.distributed.tables.slots import ShardLayout
from recinfer.distributed.types import Awaitable, NoWait, QuantizedCommCodecs
from recinfer.distributed.types.shardings import BaseEmbeddingDist, EmbeddingShardingContext, Sent
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.sparse.offsets import segment_sums

__all__ = ["SequenceShardingContext", "ShardSequenceDist"]


@dataclass
class SequenceShardingContext(EmbeddingShardingContext):
    """Data of the input exchange that the output exchange of unpooled tables needs.

    Args:
        features_before_input_dist: the input.
        input_splits: ids that this rank sent to each rank.
        output_splits: ids that it received from each rank.
        sparse_features_recat: the permutation of the received (rank, feature) pieces.
        unbucketize_permute_tensor: position of each id of the cut features.
        lengths_after_input_dist: lengths of the features received.
        sent_ids: number of ids that each slot sent, and their original positions.
    """

    features_before_input_dist: KeyedJaggedTensor | None = None
    input_splits: list[int] = field(default_factory=list)
    output_splits: list[int] = field(default_factory=list)
    sparse_features_recat: Tensor | None = None
    unbucketize_permute_tensor: Tensor | None = None
    lengths_after_input_dist: Tensor | None = None
    sent_ids: Sent = field(default_factory=Sent)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""
        if self.features_before_input_dist is not None:
            self.features_before_input_dist.record_stream(stream)  # type: ignore[arg-type]
        for tensor in (self.sparse_features_recat, self.sent_ids.permute, self.lengths_after_input_dist):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]

    def sent(self, features: KeyedJaggedTensor, ids: Sent) -> None:
        """Record the sent ``features``, and the ids' original positions."""
        super().sent(features, ids)
        self.sent_ids = ids

    def received(self, features: KeyedJaggedTensor, awaitable: Any = None) -> None:
        """Record the received ``features``, and the numbers of ids by rank."""
        super().received(features, awaitable)
        if isinstance(awaitable, KJTAllToAllTensorsAwaitable):
            self.input_splits, self.output_splits = awaitable.input_splits["values"], awaitable.output_splits["values"]
            self.sparse_features_recat = awaitable.recat
        self.lengths_after_input_dist = features.lengths()
        self.unbucketize_permute_tensor = self.sent_ids.permute


class ShardSequenceDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, list[Tensor]]):
    """Sends every id's row back to the rank of the id.

    Rows of different widths share one exchange: each row is sent as several units, whose width is the greatest common
    divisor.

    Args:
        layout: the slots.
        pg: the ranks; None for a world of one.
        rank: this rank.
        codecs: compress the data that is sent.
        width: columns of each row, where it is another number than the table's, as for one number per id.
    """

    def __init__(
        self,
        layout: ShardLayout,
        pg: dist.ProcessGroup | None,
        rank: int,
        codecs: QuantizedCommCodecs | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self._layout = layout
        self._pg = pg
        self._codecs = codecs
        widths = self._widths = layout.widths if width is None else [width] * len(layout.widths)
        self._unit = math.gcd(*widths) if widths else 1
        self._units = [width // self._unit for width in widths]
        starts = [0, *accumulate(layout.slots_per_rank)]
        self._rank_slots = [slice(a, b) for a, b in pairwise(starts)]
        self._own_units = self._units[self._rank_slots[rank]]
        self._one_width = len(set(widths)) <= 1

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[list[Tensor]]:
        """Start the exchange.

        Args:
            local_embs: ``[ids received, columns]``, by feature, in it by rank; one dimension for several widths.
            sharding_ctx: data of the input exchange.

        Returns:
            awaitable of one ``[ids, columns]`` for each column piece of each output, in module order.
        """
        assert sharding_ctx is not None, "the output exchange needs the context of the input exchange"
        ctx = sharding_ctx
        rows = keep_in_graph(local_embs.reshape(-1, self._unit))
        if self._pg is None or self._pg.size() == 1:
            return _OrderedRows(NoWait(rows), self, ctx.sent_ids)
        lengths, recat = ctx.lengths_after_input_dist, ctx.sparse_features_recat
        assert lengths is not None
        input_splits, output_splits = ctx.input_splits, ctx.output_splits
        if not self._one_width:
            lengths = self._lengths_in_units(lengths, ctx)
            sent = [n * units for n, units in zip(ctx.sent_ids.sizes, self._units)]
            input_splits = [sum(sent[slots]) for slots in self._rank_slots]
            output_splits = self._received_units(lengths, ctx)
        single = recat is not None and recat.numel() == lengths.numel()
        started = alltoall_sequence(
            rows,
            None if recat is None else torch.argsort(recat).to(torch.int32),
            recat,
            lengths,
            input_splits,
            output_splits,
            variable_batch_size=single,
            group=self._pg,
            codecs=self._codecs,
        )
        return _OrderedRows(started, self, ctx.sent_ids)

    def _slot_batches(self, ctx: SequenceShardingContext) -> list[list[int]]:
        """Batch size of each own slot on each rank."""
        if ctx.variable_batch_per_feature:
            return [list(sizes) for sizes in zip(*ctx.batch_size_per_rank_per_feature)]
        return [ctx.batch_size_per_rank] * len(self._own_units)

    def _lengths_in_units(self, lengths: Tensor, ctx: SequenceShardingContext) -> Tensor:
        """Lengths, counted in units."""
        batches = torch.tensor(
            [sum(sizes) for sizes in self._slot_batches(ctx)],
            dtype=torch.int64,  # also on a rank without a shard
            device=lengths.device,
        )
        units = torch.tensor(self._own_units, dtype=lengths.dtype, device=lengths.device)
        return lengths * torch.repeat_interleave(units, batches, output_size=lengths.numel())

    def _received_units(self, scaled: Tensor, ctx: SequenceShardingContext) -> list[int]:
        """Numbers of units that go back to each rank."""
        batches = self._slot_batches(ctx)
        ranks = len(self._rank_slots)
        if not batches:
            return [0] * ranks
        sums = segment_sums(scaled, [size for sizes in batches for size in sizes])
        return [sum(sums[rank::ranks]) for rank in range(ranks)]

    def in_order(self, rows: Tensor, sent: Sent) -> list[Tensor]:
        """Units in the order sent -> ``[ids, columns]`` of each column piece, in the order of its ids."""
        by_slot = rows.split([n * units for n, units in zip(sent.sizes, self._units)])
        pieces = [part.reshape(-1, width) for part, width in zip(by_slot, self._widths)]
        back = _Unbucketize(self._layout, sent) if sent.permute is not None else None
        result = []
        for columns in self._layout.sums:
            for slots in columns:
                cut = self._layout.slot_cuts[slots[0]]
                if cut is None:
                    result.append(pieces[slots[0]])
                else:
                    assert back is not None
                    result.append(torch.cat([pieces[i] for i in slots]).index_select(0, back.places(cut[0])))
        return result


class _Unbucketize:
    """Positions of the rows of a cut feature's ids in its concatenated buckets."""

    def __init__(self, layout: ShardLayout, sent: Sent) -> None:
        assert sent.permute is not None
        device = sent.permute.device
        num_cuts = len(layout.cuts)
        starts = list(accumulate(sent.bucket_sizes, initial=0))[:-1]
        shifts = []  # shift of a bucket from its place among all buckets to its place in its feature
        before = [0] * num_cuts
        for bucket, start in enumerate(starts):
            shifts.append(before[bucket % num_cuts] - start)
            before[bucket % num_cuts] += sent.bucket_sizes[bucket]
        sizes = torch.tensor(sent.bucket_sizes, device=device)
        shift = torch.repeat_interleave(torch.tensor(shifts, device=device), sizes, output_size=sum(sent.bucket_sizes))
        permute = sent.permute.long()
        self._places = (permute + shift[permute]).split(sent.cut_sizes)

    def places(self, cut: int) -> Tensor:
        """The positions, int64 ``[ids of the feature]``, for cut feature number ``cut``."""
        return self._places[cut]


class _OrderedRows(Awaitable[list[Tensor]]):
    """Awaitable of the rows in the order of their ids, from the awaitable of the received rows."""

    def __init__(self, rows: Awaitable[Tensor], output_dist: ShardSequenceDist, sent: Sent) -> None:
        super().__init__()
        self._rows = rows
        self._output_dist = output_dist
        self._sent = sent

    def _wait_impl(self) -> list[Tensor]:
        return self._output_dist.in_order(self._rows.wait(), self._sent)
