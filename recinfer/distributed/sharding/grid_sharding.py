"""grid_shard: column pieces of a table, each cut into rows over the ranks of one host."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding
from recinfer.distributed.types import ShardingType

__all__ = ["GridPooledEmbeddingSharding"]


class GridPooledEmbeddingSharding(PooledSharding):
    """grid_shard tables of bags: column pieces of a table, each cut into rows over the ranks of one host."""

    kind = ShardingType.GRID_SHARD
