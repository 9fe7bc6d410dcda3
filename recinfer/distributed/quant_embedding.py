"""Re-exports the sharded quantized EmbeddingCollection under TorchRec's module name; see
:mod:`recinfer.distributed.quant`."""

from __future__ import annotations

from recinfer.distributed.quant.sharded import QuantEmbeddingCollectionSharder, ShardedQuantEmbeddingCollection
from recinfer.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

__all__ = ["QuantEmbeddingCollection", "QuantEmbeddingCollectionSharder", "ShardedQuantEmbeddingCollection"]
