"""data_parallel: the whole table on every rank."""

from __future__ import annotations

from recinfer.distributed.sharding.tables import PooledSharding
from recinfer.distributed.types import ShardingType

__all__ = ["DpPooledEmbeddingSharding"]


class DpPooledEmbeddingSharding(PooledSharding):
    """data_parallel tables of bags: the whole table on every rank."""

    kind = ShardingType.DATA_PARALLEL
