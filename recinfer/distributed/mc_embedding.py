"""Sharded ManagedCollisionEmbeddingCollection for training, and its sharder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.embedding import EmbeddingCollectionContext, EmbeddingCollectionSharder
from recinfer.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
    BaseShardedManagedCollisionEmbeddingCollection,
    RemappedIds,
)
from recinfer.distributed.mc_modules import ManagedCollisionCollectionSharder
from recinfer.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from recinfer.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

__all__ = [
    "ManagedCollisionEmbeddingCollectionContext",
    "ManagedCollisionEmbeddingCollectionSharder",
    "ShardedManagedCollisionEmbeddingCollection",
]


@dataclass
class ManagedCollisionEmbeddingCollectionContext(RemappedIds, EmbeddingCollectionContext):
    """The context of one forward."""


class ShardedManagedCollisionEmbeddingCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """Managed collisions in front of sharded unpooled tables. Args as BaseShardedManagedCollisionEmbeddingCollection."""

    def __init__(
        self,
        module: ManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        ec_sharder: EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, ec_sharder, mc_sharder, env, device)

    def create_context(self) -> ManagedCollisionEmbeddingCollectionContext:
        """A new context for one forward."""
        return ManagedCollisionEmbeddingCollectionContext()

    def _places(self, ctx: Any) -> dict[str, Tensor] | None:
        found: dict[str, Tensor] | None = ctx.places_of_ids(self._embedding_module._feature_names)
        return found


class ManagedCollisionEmbeddingCollectionSharder(
    BaseManagedCollisionEmbeddingCollectionSharder[ManagedCollisionEmbeddingCollection]
):
    """Shards a ManagedCollisionEmbeddingCollection, row_wise.

    Args:
        ec_sharder: shards the tables; default: one with the settings below.
        mc_sharder: shards the managed collisions.
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    _e_sharder: EmbeddingCollectionSharder

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            ec_sharder or EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry),
            mc_sharder or ManagedCollisionCollectionSharder(),
            qcomm_codecs_registry,
        )

    def shard(
        self,
        module: ManagedCollisionEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionEmbeddingCollection:
        """The sharded module; raises ConfigError for tables that are not row_wise."""
        place = device or torch.device("cpu")
        return ShardedManagedCollisionEmbeddingCollection(module, params, self._e_sharder, self._mc_sharder, env, place)

    @property
    def module_type(self) -> type[ManagedCollisionEmbeddingCollection]:
        """The class of modules that this sharder shards."""
        return ManagedCollisionEmbeddingCollection
