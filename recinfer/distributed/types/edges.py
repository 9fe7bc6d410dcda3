"""Converts ParameterSharding to rectangles, and rectangles to torch's shard metadata."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed._shard.metadata import ShardMetadata

from recinfer.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingType
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect

__all__ = ["placement", "rects_of", "sharding_spec"]


def placement(compute_device: str, rank: int, local_world_size: int) -> str:
    """TorchRec's placement string, ``rank:3/cuda:1``; all CPU ranks share one device."""
    return f"rank:{rank}/cpu" if compute_device == "cpu" else f"rank:{rank}/{compute_device}:{rank % local_world_size}"


def sharding_spec(rects: Sequence[Rect], placements: Sequence[str]) -> EnumerableShardingSpec:
    """Torch's sharding spec of rectangles with their placements."""
    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[rect.row_start, rect.col_start], shard_sizes=[rect.rows, rect.cols], placement=place
            )
            for rect, place in zip(rects, placements)
        ]
    )


def rects_of(table: str, rows: int, cols: int, sharding: ParameterSharding, world_size: int) -> list[Rect]:
    """The rectangles of a table in the plan's order; :func:`tile` must check them.

    Args:
        table: the table's name.
        rows, cols: the table's size.
        sharding: the table's plan; for data_parallel only the ranks are read.
        world_size: ranks, for a data_parallel table that names none.

    Raises:
        ConfigError: no shards, or a shard without a rank.
    """
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        return [Rect(rank, 0, rows, 0, cols, table) for rank in sharding.ranks or range(world_size)]
    shards = getattr(sharding.sharding_spec, "shards", None)
    if not shards:
        raise ConfigError(
            f"table {table!r}: a {sharding.sharding_type} plan needs a sharding_spec that lists its shards"
        )
    rects = []
    for i, shard in enumerate(shards):
        (row, col), (height, width) = shard.shard_offsets, shard.shard_sizes
        rects.append(Rect(_rank_of(table, i, shard, sharding.ranks), row, row + height, col, col + width, table))
    return rects


def _rank_of(table: str, index: int, shard: ShardMetadata, ranks: Sequence[int] | None) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    if rank is None and ranks is not None and index < len(ranks):
        return ranks[index]
    if rank is None:
        raise ConfigError(
            f"table {table!r}: shard {index} has no rank; expected a placement rank:<n>/<device>, or its rank in ranks"
        )
    return rank
