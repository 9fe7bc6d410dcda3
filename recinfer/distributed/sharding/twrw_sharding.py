"""table_row_wise: row pieces of a table, one on each rank of one host."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import TwRwPooledEmbeddingSharding

__all__ = ["TwRwPooledEmbeddingSharding"]
