"""row_wise: row pieces of a table, one on each rank of the world."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import RwPooledEmbeddingSharding, RwSequenceEmbeddingSharding

__all__ = ["RwPooledEmbeddingSharding", "RwSequenceEmbeddingSharding"]
