"""data_parallel: the whole table on every rank."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding
from recinfer.distributed.types import ShardingType

__all__ = ["DpPooledEmbeddingSharding", "DpSequenceEmbeddingSharding"]


class DpPooledEmbeddingSharding(PooledSharding):
    """data_parallel tables of bags: the whole table on every rank."""

    kind = ShardingType.DATA_PARALLEL


class DpSequenceEmbeddingSharding(SequenceSharding):
    """data_parallel unpooled tables: the whole table on every rank."""

    kind = ShardingType.DATA_PARALLEL
