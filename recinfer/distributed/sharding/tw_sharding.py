"""table_wise: a whole table on one rank."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import TwPooledEmbeddingSharding, TwSequenceEmbeddingSharding

__all__ = ["TwPooledEmbeddingSharding", "TwSequenceEmbeddingSharding"]
