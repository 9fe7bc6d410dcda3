"""row_wise: row pieces of a table, one on each rank of the world."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding
from recinfer.distributed.types import ShardingType

__all__ = ["RwPooledEmbeddingSharding", "RwSequenceEmbeddingSharding"]


class RwPooledEmbeddingSharding(PooledSharding):
    """row_wise tables of bags: row pieces of a table, one on each rank of the world."""

    kind = ShardingType.ROW_WISE


class RwSequenceEmbeddingSharding(SequenceSharding):
    """row_wise unpooled tables: row pieces of a table, one on each rank of the world."""

    kind = ShardingType.ROW_WISE
