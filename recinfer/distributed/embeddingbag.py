"""The documented place of the sharded EmbeddingBagCollection and nn.EmbeddingBag, and of their sharders."""

from __future__ import annotations

from recinfer.distributed.sharded_bag import EmbeddingAwaitable, EmbeddingBagSharder, ShardedEmbeddingBag
from recinfer.distributed.sharded_bags import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    construct_output_kt,
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
    replace_placement_with_meta_device,
)

__all__ = [
    "EmbeddingAwaitable",
    "EmbeddingBagCollectionAwaitable",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagSharder",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingBagCollection",
    "construct_output_kt",
    "create_embedding_bag_sharding",
    "create_sharding_infos_by_sharding",
    "replace_placement_with_meta_device",
]
