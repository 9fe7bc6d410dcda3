"""Embedding collections whose ids are raw 64-bit ids: managed collisions in front of the tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.mc_modules import ManagedCollisionCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recinfer.sparse.opaque import Opaque

__all__ = [
    "BaseManagedCollisionEmbeddingCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "evict",
]


@torch.no_grad()
def evict(evictions: Mapping[str, Tensor | None], ebc: nn.Module) -> None:
    """Give rows their initial values again, so that a new id does not begin with the vector of the evicted one.

    TorchRec's sharded modules reset rows so; its unsharded modules keep the old vectors.

    Args:
        evictions: table -> rows, int64 ``[n]``, or None.
        ebc: the EmbeddingBagCollection or EmbeddingCollection.
    """
    reset = {table: rows for table, rows in evictions.items() if rows is not None and rows.numel()}
    if not reset:
        return
    middle = "embedding_bags" if isinstance(ebc, EmbeddingBagCollection) else "embeddings"
    for config in _configs(ebc):
        rows = reset.get(config.name)
        if rows is None:
            continue
        weight = ebc.get_parameter(f"{middle}.{config.name}.weight")
        fresh = torch.empty((rows.numel(), config.embedding_dim), dtype=weight.dtype, device=weight.device)
        if config.init_fn is None:
            fresh.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
        else:
            config.init_fn(fresh)
        weight.data[rows] = fresh  # .data: an earlier forward of the same step may still need its graph


def _configs(module: nn.Module) -> list[BaseEmbeddingConfig]:
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    if isinstance(module, EmbeddingCollection):
        return list(module.embedding_configs())
    raise ConfigError(
        f"managed collisions: got a {type(module).__name__}; expected an EmbeddingBagCollection or EmbeddingCollection"
    )


class BaseManagedCollisionEmbeddingCollection(Opaque, nn.Module):
    """Managed collisions in front of an embedding collection.

    Args:
        embedding_module: the tables.
        managed_collision_collection: the managed collision modules of the same tables.
        return_remapped_features: return the rows of the ids too.
        allow_in_place_embed_weight_update: no effect: evicted rows are always reset in place.

    Raises:
        ConfigError: other tables in the two collections.
    """

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        self._managed_collision_collection = managed_collision_collection
        self._return_remapped_features = return_remapped_features
        self._allow_in_place_embed_weight_update = allow_in_place_embed_weight_update
        self._embedding_module = embedding_module
        if _configs(embedding_module) != list(managed_collision_collection.embedding_configs()):
            ours = [config.name for config in _configs(embedding_module)]
            theirs = [config.name for config in managed_collision_collection.embedding_configs()]
            raise ConfigError(
                f"{type(self).__name__}: the tables {ours} and those of the managed collisions {theirs} differ in a name, an "
                f"order or a setting; expected the same configs for both"
            )

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Look up raw ids; in training mode also admit and evict them.

        Args:
            features: raw ids of at least the tables' features, int64, in any order.
            mutate_miss_lengths: see :class:`recinfer.modules.mc_modules.ManagedCollisionCollection`.

        Returns:
            (the result of the embedding collection, the features with rows instead of ids). The second is None unless
            the module was built with ``return_remapped_features``.
        """
        rows = self._managed_collision_collection(features, mutate_miss_lengths=mutate_miss_lengths)
        evict(self._managed_collision_collection.evict(), self._embedding_module)
        return self._embedding_module(rows), rows if self._return_remapped_features else None


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """Managed collisions in front of unpooled tables. Args as :class:`BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_collection(self) -> nn.Module:
        return self._embedding_module


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """Managed collisions in front of pooled tables. Args as :class:`BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_bag_collection(self) -> nn.Module:
        return self._embedding_module
