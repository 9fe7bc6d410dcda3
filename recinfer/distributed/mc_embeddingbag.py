"""Sharded ManagedCollisionEmbeddingBagCollection for training, and its sharder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from recinfer.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
    BaseShardedManagedCollisionEmbeddingCollection,
    RemappedIds,
)
from recinfer.distributed.mc_modules import ManagedCollisionCollectionSharder
from recinfer.distributed.sharded.bags import EmbeddingBagCollectionContext, EmbeddingBagCollectionSharder
from recinfer.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from recinfer.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

__all__ = [
    "ManagedCollisionEmbeddingBagCollectionContext",
    "ManagedCollisionEmbeddingBagCollectionSharder",
    "ShardedManagedCollisionEmbeddingBagCollection",
]


@dataclass
class ManagedCollisionEmbeddingBagCollectionContext(RemappedIds, EmbeddingBagCollectionContext):
    """The context of one forward."""


class ShardedManagedCollisionEmbeddingBagCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """Managed collisions in front of sharded pooled tables. Args as BaseShardedManagedCollisionEmbeddingCollection."""

    def __init__(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        ebc_sharder: EmbeddingBagCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, ebc_sharder, mc_sharder, env, device)

    def create_context(self) -> ManagedCollisionEmbeddingBagCollectionContext:
        """A new context for one forward."""
        return ManagedCollisionEmbeddingBagCollectionContext()


class ManagedCollisionEmbeddingBagCollectionSharder(
    BaseManagedCollisionEmbeddingCollectionSharder[ManagedCollisionEmbeddingBagCollection]
):
    """Shards a ManagedCollisionEmbeddingBagCollection, row_wise.

    Args:
        ebc_sharder: shards the tables; default: one with the settings below.
        mc_sharder: shards the managed collisions.
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    _e_sharder: EmbeddingBagCollectionSharder

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            ebc_sharder or EmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry),
            mc_sharder or ManagedCollisionCollectionSharder(),
            qcomm_codecs_registry,
        )

    def shard(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionEmbeddingBagCollection:
        """The sharded module; raises ConfigError for tables that are not row_wise."""
        place = device or torch.device("cpu")
        return ShardedManagedCollisionEmbeddingBagCollection(
            module, params, self._e_sharder, self._mc_sharder, env, place
        )

    @property
    def module_type(self) -> type[ManagedCollisionEmbeddingBagCollection]:
        """The class of modules that this sharder shards."""
        return ManagedCollisionEmbeddingBagCollection
