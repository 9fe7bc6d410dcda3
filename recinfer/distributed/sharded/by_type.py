"""Looks up the sharding class of a sharding type."""

from __future__ import annotations

from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding
from recinfer.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding, CwSequenceEmbeddingSharding
from recinfer.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding, DpSequenceEmbeddingSharding
from recinfer.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from recinfer.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding, RwSequenceEmbeddingSharding
from recinfer.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding, TwSequenceEmbeddingSharding
from recinfer.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from recinfer.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from recinfer.errors import ConfigError

__all__ = ["pooled_sharding_of", "sequence_sharding_of"]

_POOLED: dict[str, type[PooledSharding]] = {
    "column_wise": CwPooledEmbeddingSharding,
    "data_parallel": DpPooledEmbeddingSharding,
    "grid_shard": GridPooledEmbeddingSharding,
    "row_wise": RwPooledEmbeddingSharding,
    "table_column_wise": TwCwPooledEmbeddingSharding,
    "table_row_wise": TwRwPooledEmbeddingSharding,
    "table_wise": TwPooledEmbeddingSharding,
}
_UNPOOLED: dict[str, type[SequenceSharding]] = {
    "column_wise": CwSequenceEmbeddingSharding,
    "data_parallel": DpSequenceEmbeddingSharding,
    "row_wise": RwSequenceEmbeddingSharding,
    "table_wise": TwSequenceEmbeddingSharding,
}


def pooled_sharding_of(sharding_type: str) -> type[PooledSharding]:
    """The sharding class for pooled tables; raises ConfigError for an unknown type."""
    if sharding_type not in _POOLED:
        raise ConfigError(f"sharding type {sharding_type!r}; expected one of {sorted(_POOLED)}")
    return _POOLED[sharding_type]


def sequence_sharding_of(sharding_type: str) -> type[SequenceSharding]:
    """The sharding class for unpooled tables; raises ConfigError for an unknown type."""
    if sharding_type not in _UNPOOLED:
        raise ConfigError(f"sharding type {sharding_type!r}; expected one of {sorted(_UNPOOLED)} for unpooled tables")
    return _UNPOOLED[sharding_type]
