"""The input exchange of every sharding type: expands features to slots, divides ids of row pieces into buckets, and
sends each slot.

One permutation and one exchange serve all tables of a sharding; ShardLayout computes their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.exchange.kjt import KJTAllToAll
from recinfer.distributed.tables.grouping import bucketize_kjt_before_all2all
from recinfer.distributed.tables.slots import ShardLayout
from recinfer.distributed.types import Awaitable, NoWait
from recinfer.distributed.types.shardings import BaseSparseFeaturesDist, EmbeddingShardingContext, Sent
from recinfer.errors import InputError
from recinfer.sparse.checks import MissingKeyError, check_distinct_keys
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["RowsOf", "ShardFeaturesDist", "join_keys", "with_values"]

RowsOf = Callable[[KeyedJaggedTensor], Tensor]


def join_keys(parts: Sequence[KeyedJaggedTensor], order: Sequence[int]) -> KeyedJaggedTensor:
    """Join several KeyedJaggedTensors, with their keys, numbered consecutively, in ``order``; runs of adjacent keys are
    copied together.

    Values, lengths and weights are copied once (not at all when the order is that of a single part).
    """
    owners = [(p, i) for p, part in enumerate(parts) for i in range(len(part.keys()))]
    runs: list[list[int]] = []  # part, first key, last key + 1
    for at in order:
        p, i = owners[at]
        if runs and runs[-1][0] == p and runs[-1][2] == i:
            runs[-1][2] = i + 1
        else:
            runs.append([p, i, i + 1])
    if len(runs) == 1 and runs[0][1:] == [0, len(parts[runs[0][0]].keys())]:
        return parts[runs[0][0]]
    first = parts[0]
    weighted = first.weights_or_none() is not None
    variable = first.variable_stride_per_key()
    values, lengths, weights = [], [], []
    for p, start, stop in runs:
        part = parts[p]
        ends, lengths_ends = part.offset_per_key(), part.lengths_offset_per_key()
        values.append(part.values()[ends[start] : ends[stop]])
        lengths.append(part.lengths()[lengths_ends[start] : lengths_ends[stop]])
        if weighted:
            weights.append(part.weights()[ends[start] : ends[stop]])
    sizes = [part.length_per_key() for part in parts]
    strides = [part.stride_per_key_per_rank() for part in parts]
    result = KeyedJaggedTensor.from_parts_unchecked(
        [parts[p].keys()[i] for p, i in (owners[at] for at in order)],
        torch.cat(values) if values else first.values()[:0],
        torch.cat(lengths) if lengths else first.lengths()[:0],
        weights=(torch.cat(weights) if weights else first.weights()[:0]) if weighted else None,
        stride=first.stride(),
        stride_per_key_per_rank=[strides[p][i] for p, i in (owners[at] for at in order)] if variable else None,
    )
    result._length_per_key = [sizes[p][i] for p, i in (owners[at] for at in order)]
    return result


def with_values(features: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    """``features`` with other ids."""
    variable = features.variable_stride_per_key()
    result = KeyedJaggedTensor.from_parts_unchecked(
        features.keys(),
        values,
        features.lengths(),
        weights=features.weights_or_none(),
        stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
    result._length_per_key = features.length_per_key()
    return result


class _Expansion:
    """The mapping from input keys to slots, for one order of keys.

    Args:
        layout: the slots.
        keys: keys of the input.
        device: device of the ids.

    Raises:
        InputError: a key occurs twice.
        MissingKeyError: a feature that the tables read is not among ``keys``.
    """

    def __init__(self, layout: ShardLayout, keys: Sequence[str], device: torch.device) -> None:
        check_distinct_keys(keys)
        places = {key: i for i, key in enumerate(keys)}
        missing = [f for f in layout.features if f not in places]
        if missing:
            raise MissingKeyError(f"features {missing} are not in the input; it has {list(keys)}")
        num_keys, num_cuts = len(keys), len(layout.cuts)
        self.num_buckets = layout.num_buckets
        self.cut_keys = [places[feature] for feature, _ in layout.cuts]
        self.only_cuts = num_cuts > 0 and None not in layout.slot_cuts
        first_bucket = 0 if self.only_cuts else num_keys
        self.order = [  # among the input's keys, then the buckets'; among the buckets' alone when all is cut
            places[slot.feature] if cut is None else first_bucket + cut[1] * num_cuts + cut[0]
            for slot, cut in zip(layout.slots, layout.slot_cuts)
        ]
        self._place_edges([edges for _, edges in layout.cuts], device)

    def _place_edges(self, all_edges: list[tuple[int, ...]], device: torch.device) -> None:
        """Store a block size if all blocks are equal (the last may be shorter), else the edges."""
        blocks = [edges[1] for edges in all_edges]
        even = all(
            all(start == i * block for i, start in enumerate(edges[:-1])) and edges[-1] - edges[-2] <= block
            for edges, block in zip(all_edges, blocks)
        )
        self.block_sizes = torch.tensor(blocks, dtype=torch.int64, device=device)
        self.edges: list[Tensor] | None = None
        if not even:
            padded = [[*edges, *[edges[-1]] * (self.num_buckets + 1 - len(edges))] for edges in all_edges]
            self.edges = [torch.tensor(edges, dtype=torch.int64, device=device) for edges in padded]

    def expand(
        self, features: KeyedJaggedTensor, want_permute: bool, rows_of: RowsOf | None = None
    ) -> tuple[KeyedJaggedTensor, Sent]:
        """The slots' ids in the order they are sent; ``rows_of``: see :class:`ShardFeaturesDist`."""
        if not self.num_buckets:
            sent = join_keys([features], self.order)
            return sent, Sent(sizes=sent.length_per_key())
        cut = join_keys([features], self.cut_keys)
        raw = cut.values()
        if rows_of is not None:
            cut = with_values(cut, rows_of(cut))
        weights = cut.weights_or_none()
        learned = weights is not None and weights.requires_grad
        buckets, permute = bucketize_kjt_before_all2all(
            cut,
            self.num_buckets,
            self.block_sizes,
            output_permute=want_permute or learned or rows_of is not None,
            block_bucketize_row_pos=self.edges,
        )
        if learned:
            assert permute is not None
            assert weights is not None
            back = torch.empty_like(permute)
            back[permute.long()] = torch.arange(permute.numel(), dtype=permute.dtype, device=permute.device)
            buckets._weights = weights.index_select(0, back)  # the op's copy has no gradient
        if rows_of is not None:
            assert permute is not None
            buckets._values = torch.empty_like(raw).index_copy_(0, permute.long(), raw)
        parts = [buckets] if self.only_cuts else [features, buckets]
        sent = join_keys(parts, self.order)
        return sent, Sent(sent.length_per_key(), cut.length_per_key(), buckets.length_per_key(), permute)


class ShardFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Sends each slot's ids to the rank that holds its rectangle.

    Args:
        layout: the slots.
        pg: the ranks; None for a world of one.
        want_permute: record the positions of bucketized ids; unpooled outputs are put back in order with them.
        send_weights: send weights with the ids; False when they are computed and sent later.

    Attributes:
        rows_of: for raw ids, which are sent as they are: the features with raw ids -> a row for each id, int64 ``[N]``, of
            the row piece that the id goes to. None: ids are rows, and are sent relative to their row piece.
    """

    def __init__(
        self,
        layout: ShardLayout,
        pg: dist.ProcessGroup | None,
        want_permute: bool = False,
        send_weights: bool = True,
    ) -> None:
        super().__init__()
        self._send_weights = send_weights and layout.is_weighted
        self._layout = layout
        self._want_permute = want_permute
        self._dist = KJTAllToAll(pg, layout.slots_per_rank) if pg is not None else None
        self.rows_of: RowsOf | None = None
        self._expansions: dict[tuple[torch.device, tuple[str, ...]], _Expansion] = {}

    def forward(
        self, sparse_features: KeyedJaggedTensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start the exchange.

        Args:
            sparse_features: at least the features of the tables, in any order.
            sharding_ctx: records what was sent.

        Raises:
            MissingKeyError: a feature of the tables is missing.
            InputError: a key occurs twice, or the tables need weights and there are none.
        """
        slots, sent = self._expand(self._weighted(sparse_features))
        if sharding_ctx is not None:
            sharding_ctx.sent(slots, sent)
        if self._dist is None:
            return NoWait(NoWait(slots))
        return self._dist(slots)

    def _expand(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Sent]:
        device, keys = features.device(), tuple(features.keys())
        expansion = self._expansions.get((device, keys))
        if expansion is None:
            expansion = self._expansions[device, keys] = _Expansion(self._layout, keys, device)
        return expansion.expand(features, self._want_permute, self.rows_of)

    def weights_in_order(self, features: KeyedJaggedTensor) -> Tensor:
        """The weights of ``features``, with their gradients, in the order in which its ids are sent."""
        return self._expand(features)[0].weights()

    def _weighted(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with weights if and only if the tables take weights."""
        if self._send_weights:
            if features.weights_or_none() is None:
                raise InputError("weights are missing; this collection is weighted and needs one weight per id")
            return features
        if features.weights_or_none() is None:
            return features
        bare = KeyedJaggedTensor.from_parts_unchecked(
            features.keys(),
            features.values(),
            features.lengths(),
            stride=features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
        )
        bare._length_per_key = features.length_per_key_or_none()
        return bare
