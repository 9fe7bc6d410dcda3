"""column_wise: column pieces of a table, each on any rank."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding
from recinfer.distributed.types import ShardingType

__all__ = ["CwPooledEmbeddingSharding", "CwSequenceEmbeddingSharding"]


class CwPooledEmbeddingSharding(PooledSharding):
    """column_wise tables of bags: column pieces of a table, each on any rank."""

    kind = ShardingType.COLUMN_WISE


class CwSequenceEmbeddingSharding(SequenceSharding):
    """column_wise unpooled tables: column pieces of a table, each on any rank."""

    kind = ShardingType.COLUMN_WISE
