"""data_parallel: the whole table on every rank."""

from __future__ import annotations

from recinfer.distributed.sharded.by_type import DpPooledEmbeddingSharding, DpSequenceEmbeddingSharding

__all__ = ["DpPooledEmbeddingSharding", "DpSequenceEmbeddingSharding"]
