"""TorchRec's place of the sharded quantized EmbeddingCollection: see :mod:`recinfer.distributed.quant`."""

from __future__ import annotations

from recinfer.distributed.quant.sharded import QuantEmbeddingCollectionSharder, ShardedQuantEmbeddingCollection
from recinfer.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

__all__ = ["QuantEmbeddingCollection", "QuantEmbeddingCollectionSharder", "ShardedQuantEmbeddingCollection"]
