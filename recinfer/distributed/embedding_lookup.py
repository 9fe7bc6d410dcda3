"""Re-exports lookups in local shards, float and packed, under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.quant.adapters import (
    InferGroupedEmbeddingsLookup,
    InferGroupedLookupMixin,
    InferGroupedPooledEmbeddingsLookup,
    MetaInferGroupedEmbeddingsLookup,
    MetaInferGroupedPooledEmbeddingsLookup,
)
from recinfer.distributed.tables.group_kernel import CommOpGradientScaling
from recinfer.distributed.tables.lookups import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    fx_wrap_tensor_view2d,
)
from recinfer.distributed.tables.rank_lookup import embeddings_cat_empty_rank_handle

__all__ = [
    "CommOpGradientScaling",
    "GroupedEmbeddingsLookup",
    "GroupedPooledEmbeddingsLookup",
    "InferGroupedEmbeddingsLookup",
    "InferGroupedLookupMixin",
    "InferGroupedPooledEmbeddingsLookup",
    "MetaInferGroupedEmbeddingsLookup",
    "MetaInferGroupedPooledEmbeddingsLookup",
    "embeddings_cat_empty_rank_handle",
    "fx_wrap_tensor_view2d",
]
