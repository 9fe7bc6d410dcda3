"""table_column_wise: column pieces of a table on the ranks of one host."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding
from recinfer.distributed.types import ShardingType

__all__ = ["TwCwPooledEmbeddingSharding"]


class TwCwPooledEmbeddingSharding(PooledSharding):
    """table_column_wise tables of bags: column pieces of a table on the ranks of one host."""

    kind = ShardingType.TABLE_COLUMN_WISE
