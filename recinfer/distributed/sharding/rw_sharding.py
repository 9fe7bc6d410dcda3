"""row_wise: row pieces of a table, one on each rank of the world."""

from __future__ import annotations

from recinfer.distributed.sharding.tables import PooledSharding
from recinfer.distributed.types import ShardingType

__all__ = ["RwPooledEmbeddingSharding"]


class RwPooledEmbeddingSharding(PooledSharding):
    """row_wise tables of bags: row pieces of a table, one on each rank of the world."""

    kind = ShardingType.ROW_WISE
