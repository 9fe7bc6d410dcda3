"""TorchRec's class of each sharding type, and the class that shards the tables of a plan's type."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding, TableSharding
from recinfer.distributed.types import ShardingType
from recinfer.distributed.types.sharding_types import rule_of, types_where
from recinfer.errors import ConfigError

__all__ = [
    "CwPooledEmbeddingSharding",
    "CwSequenceEmbeddingSharding",
    "DpPooledEmbeddingSharding",
    "DpSequenceEmbeddingSharding",
    "GridPooledEmbeddingSharding",
    "RwPooledEmbeddingSharding",
    "RwSequenceEmbeddingSharding",
    "TwCwPooledEmbeddingSharding",
    "TwPooledEmbeddingSharding",
    "TwRwPooledEmbeddingSharding",
    "TwSequenceEmbeddingSharding",
    "pooled_sharding_of",
    "sequence_sharding_of",
]


class TwPooledEmbeddingSharding(PooledSharding):
    """table_wise tables of bags: a whole table on one rank."""

    kind = ShardingType.TABLE_WISE


class TwSequenceEmbeddingSharding(SequenceSharding):
    """table_wise unpooled tables: a whole table on one rank."""

    kind = ShardingType.TABLE_WISE


class CwPooledEmbeddingSharding(PooledSharding):
    """column_wise tables of bags: column pieces of a table, each on any rank."""

    kind = ShardingType.COLUMN_WISE


class CwSequenceEmbeddingSharding(SequenceSharding):
    """column_wise unpooled tables: column pieces of a table, each on any rank."""

    kind = ShardingType.COLUMN_WISE


class RwPooledEmbeddingSharding(PooledSharding):
    """row_wise tables of bags: row pieces of a table, one on each rank of the world."""

    kind = ShardingType.ROW_WISE


class RwSequenceEmbeddingSharding(SequenceSharding):
    """row_wise unpooled tables: row pieces of a table, one on each rank of the world."""

    kind = ShardingType.ROW_WISE


class DpPooledEmbeddingSharding(PooledSharding):
    """data_parallel tables of bags: the whole table on every rank."""

    kind = ShardingType.DATA_PARALLEL


class DpSequenceEmbeddingSharding(SequenceSharding):
    """data_parallel unpooled tables: the whole table on every rank."""

    kind = ShardingType.DATA_PARALLEL


class TwRwPooledEmbeddingSharding(PooledSharding):
    """table_row_wise tables of bags: row pieces of a table, one on each rank of one host."""

    kind = ShardingType.TABLE_ROW_WISE


class TwCwPooledEmbeddingSharding(PooledSharding):
    """table_column_wise tables of bags: column pieces of a table on the ranks of one host."""

    kind = ShardingType.TABLE_COLUMN_WISE


class GridPooledEmbeddingSharding(PooledSharding):
    """grid_shard tables of bags: column pieces of a table, each cut into rows over the ranks of one host."""

    kind = ShardingType.GRID_SHARD


def _value(cls: type[TableSharding]) -> str:
    assert cls.kind is not None
    return cls.kind.value


# Types that TorchRec has a class for; types without one get a class when a plan uses them.
_POOLED = {
    _value(cls): cls
    for cls in (
        TwPooledEmbeddingSharding,
        CwPooledEmbeddingSharding,
        RwPooledEmbeddingSharding,
        DpPooledEmbeddingSharding,
        TwRwPooledEmbeddingSharding,
        TwCwPooledEmbeddingSharding,
        GridPooledEmbeddingSharding,
    )
}
_UNPOOLED = {
    _value(cls): cls
    for cls in (
        TwSequenceEmbeddingSharding,
        CwSequenceEmbeddingSharding,
        RwSequenceEmbeddingSharding,
        DpSequenceEmbeddingSharding,
    )
}


def pooled_sharding_of(sharding_type: str) -> type[PooledSharding]:
    """The sharding class for pooled tables; raises ConfigError for an unknown type."""
    rule = rule_of(sharding_type)
    return _POOLED.get(sharding_type) or type("PooledShardingOfType", (PooledSharding,), {"kind": rule.kind})


def sequence_sharding_of(sharding_type: str) -> type[SequenceSharding]:
    """The sharding class for unpooled tables; raises ConfigError for an unknown type."""
    known = types_where(lambda rule: rule.unpooled)
    if sharding_type not in known:
        raise ConfigError(f"sharding type {sharding_type!r}; expected one of {sorted(known)} for unpooled tables")
    made = {"kind": rule_of(sharding_type).kind}
    return _UNPOOLED.get(sharding_type) or type("SequenceShardingOfType", (SequenceSharding,), made)
