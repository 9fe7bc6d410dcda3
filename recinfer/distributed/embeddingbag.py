"""Re-exports the sharded EmbeddingBagCollection and nn.EmbeddingBag and their sharders under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.sharded.bag import EmbeddingAwaitable, EmbeddingBagSharder, ShardedEmbeddingBag
from recinfer.distributed.sharded.bags import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    _create_mean_pooling_divisor,  # noqa: F401 - a private name that programs written for TorchRec import
    construct_output_kt,
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
    replace_placement_with_meta_device,
)
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface

__all__ = [
    "EmbeddingAwaitable",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionAwaitable",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingBagSharder",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingBagCollection",
    "construct_output_kt",
    "create_embedding_bag_sharding",
    "create_sharding_infos_by_sharding",
    "replace_placement_with_meta_device",
]
