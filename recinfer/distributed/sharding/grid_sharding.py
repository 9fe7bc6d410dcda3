"""grid_shard: column pieces of a table, each cut into rows over the ranks of one host."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import GridPooledEmbeddingSharding

__all__ = ["GridPooledEmbeddingSharding"]
