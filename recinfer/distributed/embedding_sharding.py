"""Re-exports infos, contexts, steps and awaitables of shardings under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.exchange.kjt import KJTSplitsAllToAllMeta
from recinfer.distributed.exchange.kjt_lists import (
    FusedKJTListSplitsAwaitable,
    KJTListAwaitable,
    KJTListSplitsAwaitable,
    ListOfKJTListAwaitable,
    ListOfKJTListSplitsAwaitable,
)
from recinfer.distributed.tables.grouping import bucketize_kjt_before_all2all, group_tables
from recinfer.distributed.types.shardings import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)

__all__ = [
    "BaseEmbeddingDist",
    "BaseSparseFeaturesDist",
    "EmbeddingSharding",
    "EmbeddingShardingContext",
    "EmbeddingShardingInfo",
    "FusedKJTListSplitsAwaitable",
    "KJTListAwaitable",
    "KJTListSplitsAwaitable",
    "KJTSplitsAllToAllMeta",
    "ListOfKJTListAwaitable",
    "ListOfKJTListSplitsAwaitable",
    "bucketize_kjt_before_all2all",
    "group_tables",
]
