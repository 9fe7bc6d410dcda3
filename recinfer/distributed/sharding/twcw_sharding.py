"""table_column_wise: column pieces of a table on the ranks of one host."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import TwCwPooledEmbeddingSharding

__all__ = ["TwCwPooledEmbeddingSharding"]
