"""column_wise: column pieces of a table, each on any rank."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import CwPooledEmbeddingSharding, CwSequenceEmbeddingSharding

__all__ = ["CwPooledEmbeddingSharding", "CwSequenceEmbeddingSharding"]
