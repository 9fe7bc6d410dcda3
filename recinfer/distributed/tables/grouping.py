"""Groups shards that one kernel call looks up, and splits ids into buckets of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer import fbgemm
from recinfer.distributed.types.tables import GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["bucketize_kjt_before_all2all", "group_tables"]


# --------------------------------------------------------------------------------------------------- grouping


def group_tables(tables_per_rank: Sequence[Sequence[ShardedEmbeddingTable]]) -> list[list[GroupedEmbeddingConfig]]:
    """Group the shards that one kernel call can look up, rank by rank.

    Shards of a group have the same element type, pooling, weighting, kernel and kernel settings; unpooled ones also the
    same width. Groups and their tables keep the order of first occurrence.

    Args:
        tables_per_rank: rectangles of each rank.

    Returns:
        the groups of each rank.
    """
    return [_group(tables) for tables in tables_per_rank]


def _group(tables: Sequence[ShardedEmbeddingTable]) -> list[GroupedEmbeddingConfig]:
    groups: dict[tuple[Any, ...], list[ShardedEmbeddingTable]] = {}
    for table in tables:
        key = (
            table.data_type,
            table.pooling,
            table.is_weighted,
            table.has_feature_processor,
            table.compute_kernel,
            _settings_key(table.fused_params),
            table.local_cols if table.pooling.name == "NONE" else None,
        )
        groups.setdefault(key, []).append(table)
    return [
        GroupedEmbeddingConfig(
            data_type=members[0].data_type,
            pooling=members[0].pooling,
            is_weighted=members[0].is_weighted,
            has_feature_processor=members[0].has_feature_processor,
            compute_kernel=members[0].compute_kernel,
            embedding_tables=members,
            fused_params=members[0].fused_params,
        )
        for members in groups.values()
    ]


def _settings_key(fused_params: dict[str, Any] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(name), repr(value)) for name, value in (fused_params or {}).items()))


# --------------------------------------------------------------------------------------------------- bucketize


def bucketize_kjt_before_all2all(
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: Tensor,
    output_permute: bool = False,
    bucketize_pos: bool = False,
    block_bucketize_row_pos: list[Tensor] | None = None,
) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """Split the ids of every feature into buckets of adjacent rows, and make the ids relative to their bucket.

    Args:
        kjt: ids of ``F`` features.
        num_buckets: buckets per feature.
        block_sizes: rows of a bucket, integers ``[F]``.
        output_permute: also return the position of each id.
        bucketize_pos: the weights of the result are the ids' positions in their bags.
        block_bucketize_row_pos: the row edges ``[num_buckets + 1]`` of each feature, when buckets are uneven.

    Returns:
        ``num_buckets * F`` keys, bucket by bucket; and int ``[N]``, the position of each id of ``kjt`` in the result,
        or None.

    Raises:
        InputError: not one block size per feature.
    """
    num_keys = len(kjt.keys())
    if block_sizes.numel() != num_keys:
        raise InputError(
            f"bucketize: got {block_sizes.numel()} block sizes for {num_keys} features; expected one for each"
        )
    values, lengths = kjt.values(), kjt.lengths().view(-1)
    variable = kjt.variable_stride_per_key()
    edges = block_bucketize_row_pos
    if edges is not None and edges and edges[0].dtype != values.dtype:
        edges = [e.to(values.dtype) for e in edges]
    sizes = torch.tensor(kjt.stride_per_key(), dtype=lengths.dtype, device=lengths.device) if variable else None
    blocks, given = block_sizes.to(values.dtype), kjt.weights_or_none()
    if fbgemm.INSTALLED:
        bucket_lengths, bucket_values, weights, positions, permute = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            values,
            bucketize_pos,
            output_permute,
            blocks,
            num_buckets,
            given,
            sizes,
            max(kjt.stride_per_key(), default=0) if variable else -1,
            edges,
        )
    else:
        steps = torch.arange(num_buckets + 1, dtype=values.dtype, device=values.device)
        edges_F = torch.stack(edges) if edges else blocks.unsqueeze(1) * steps
        features = torch.arange(num_keys, device=values.device)
        feature_of_bag = features.repeat_interleave(
            kjt.stride() if sizes is None else sizes, output_size=lengths.numel()
        )
        bucket_lengths, bucket_values, positions, order = _bucketized(values, lengths, edges_F, feature_of_bag)
        weights = None if given is None else given[order]
        permute = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    strides = kjt.stride_per_key_per_rank()
    result = KeyedJaggedTensor.from_parts_unchecked(
        list(kjt.keys()) * num_buckets,
        bucket_values,
        bucket_lengths,
        weights=positions.to(torch.float32) if bucketize_pos else weights,
        stride=kjt.stride(),
        stride_per_key_per_rank=strides * num_buckets if variable else None,
    )
    return result, permute if output_permute else None


def _bucketized(
    values_N: Tensor, lengths: Tensor, edges_F: Tensor, feature_of_bag: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FBGEMM's operator in torch, for a GPU machine without FBGEMM. Returns the buckets' lengths and values, the values' positions in
    their bags, and the order in which they were taken."""
    num_bags, num_buckets = lengths.numel(), edges_F.shape[1] - 1
    bag_of_id = torch.arange(num_bags, device=lengths.device).repeat_interleave(lengths, output_size=values_N.numel())
    edges_N = edges_F[feature_of_bag[bag_of_id]]
    bucket_of_id = (values_N.unsqueeze(1) >= edges_N[:, 1:-1]).sum(1)
    place = bucket_of_id * num_bags + bag_of_id
    order = place.argsort(stable=True)
    bucket_lengths = lengths.new_zeros(num_buckets * num_bags).scatter_add_(
        0, place, torch.ones_like(place).to(lengths.dtype)
    )
    positions = torch.arange(values_N.numel(), device=lengths.device) - (lengths.cumsum(0) - lengths)[bag_of_id]
    relative = values_N - edges_N.gather(1, bucket_of_id.unsqueeze(1)).squeeze(1)
    return bucket_lengths, relative[order], positions[order], order
