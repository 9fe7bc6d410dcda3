"""Re-exports the sharded quantized EmbeddingBagCollection under TorchRec's module name; see
:mod:`recinfer.distributed.quant`."""

from __future__ import annotations

from recinfer.distributed.quant.pooled_sharding import create_infer_embedding_bag_sharding
from recinfer.distributed.quant.sharded import QuantEmbeddingBagCollectionSharder, ShardedQuantEmbeddingBagCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

__all__ = [
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingBagCollectionSharder",
    "ShardedQuantEmbeddingBagCollection",
    "create_infer_embedding_bag_sharding",
]
