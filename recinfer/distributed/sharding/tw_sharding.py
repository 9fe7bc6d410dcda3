"""table_wise: a whole table on one rank."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding
from recinfer.distributed.types import ShardingType

__all__ = ["TwPooledEmbeddingSharding", "TwSequenceEmbeddingSharding"]


class TwPooledEmbeddingSharding(PooledSharding):
    """table_wise tables of bags: a whole table on one rank."""

    kind = ShardingType.TABLE_WISE


class TwSequenceEmbeddingSharding(SequenceSharding):
    """table_wise unpooled tables: a whole table on one rank."""

    kind = ShardingType.TABLE_WISE
