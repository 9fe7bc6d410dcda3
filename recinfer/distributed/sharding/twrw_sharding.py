"""table_row_wise: row pieces of a table, one on each rank of one host."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding
from recinfer.distributed.types import ShardingType

__all__ = ["TwRwPooledEmbeddingSharding"]


class TwRwPooledEmbeddingSharding(PooledSharding):
    """table_row_wise tables of bags: row pieces of a table, one on each rank of one host."""

    kind = ShardingType.TABLE_ROW_WISE
