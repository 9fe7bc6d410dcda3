"""Base of the sharded embedding collections with managed collisions: raw ids go to the ranks of their rows, which turn them into
rows, reset the rows of evicted ids, and look up."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from recinfer.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from recinfer.distributed.mc_modules import ManagedCollisionCollectionSharder, ShardedManagedCollisionCollection
from recinfer.distributed.sharded.bags import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from recinfer.distributed.types import (
    Awaitable,
    NoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from recinfer.distributed.types.embedding_modules import FeatureShardingMixIn, ShardedEmbeddingModule
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder, embedding_parameters
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.shardings import ShardedCollectionContext
from recinfer.module_tree import append_prefix
from recinfer.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from recinfer.optim.fused import FusedOptimizerModule
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer
from recinfer.sparse.checks import check_id_dtype
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseManagedCollisionEmbeddingCollectionSharder",
    "BaseShardedManagedCollisionEmbeddingCollection",
    "RemappedIds",
]

_EMBEDDINGS, _COLLISIONS = "_embedding_module", "_managed_collision_collection"
M = TypeVar("M", bound=BaseManagedCollisionEmbeddingCollection)


@dataclass
class RemappedIds(ShardedCollectionContext[Any]):
    """The part of a forward's context for rows that are returned; comes before the collection's context in a class's bases.

    Args:
        features: this rank's raw ids, if their rows are returned.
        remapped_kjt: rows in place of the received ids, if they are returned.
    """

    features: KeyedJaggedTensor | None = None
    remapped_kjt: KJTList | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""
        super().record_stream(stream)
        for part in (self.features, self.remapped_kjt):
            if part is not None:
                part.record_stream(stream)  # type: ignore[arg-type]


class BaseShardedManagedCollisionEmbeddingCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], Any, Any], FusedOptimizerModule
):
    """Managed collisions in front of sharded tables, row_wise, each rank with the ids of its rows.

    ``forward(features) -> (awaitable of the vectors, awaitable of the features with rows instead of ids)``: each rank passes the raw
    ids of its own batch; the second is an awaitable of None without ``return_remapped_features`` of the module.
    In training mode the ranks admit and evict ids, and evicted rows begin anew: initial values, optimizer state zero.

    Args:
        module: the collection. The values of its tables are kept; its ids are not: load a checkpoint for them.
        table_name_to_parameter_sharding: the plan of every table.
        e_sharder: shards the tables.
        mc_sharder: shards the managed collisions.
        env: the ranks.
        device: device of rows and buffers.

    Raises:
        ConfigError: a table that is not row_wise.
    """

    def __init__(
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        e_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._return_remapped_features = module._return_remapped_features
        tables: Any = module._embedding_module
        plan: Any = table_name_to_parameter_sharding
        self._embedding_module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection = e_sharder.shard(
            tables, plan, env, device=device
        )
        self._managed_collision_collection: ShardedManagedCollisionCollection = mc_sharder.shard(
            module._managed_collision_collection,
            table_name_to_parameter_sharding,
            env,
            self._embedding_module._shardings,
            device=device,
        )
        self._embedding_module.take_raw_ids(self._managed_collision_collection.rows_of)
        self._input_dists = self._embedding_module._input_dists
        self._lookups = self._embedding_module._lookups
        self._output_dists = self._embedding_module._output_dists

    @abc.abstractmethod
    def create_context(self) -> Any:
        """A new context for one forward, which has ``features`` and ``remapped_kjt``."""

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Start sending raw ids to the ranks of their rows.

        Raises:
            MissingKeyError: a feature of the tables is not in ``features``.
            InputError: a key occurs twice, or ids that are not int32 or int64.
        """
        check_id_dtype(features.values())
        if self._return_remapped_features:
            ctx.features = features
        return self._embedding_module.input_dist(ctx, self._managed_collision_collection.preprocess(features))

    @torch.no_grad()
    def _rows(self, ctx: Any, dist_input: KJTList) -> KJTList:
        """Rows in place of the received ids; the rows of evicted ids begin anew."""
        rows = self._managed_collision_collection.compute(dist_input)
        if self._return_remapped_features:
            ctx.remapped_kjt = rows
        for table, evicted in self._managed_collision_collection.evict().items():
            if evicted is not None and evicted.numel():
                self._embedding_module.reset_rows(table, evicted)
        return rows

    def compute(self, ctx: Any, dist_input: KJTList) -> list[Tensor]:
        """Turn the received ids into rows, and look them up."""
        return self._embedding_module.compute(ctx, self._rows(ctx, dist_input))

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        """Start sending vectors, and rows if they are returned, to the ranks of their examples; returns both awaitables."""
        return self._embedding_module.output_dist(ctx, output), self._remapped(ctx)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        """Run :meth:`compute` and :meth:`output_dist`."""
        rows = self._rows(ctx, input)
        return self._embedding_module.compute_and_output_dist(ctx, rows), self._remapped(ctx)

    def _remapped(self, ctx: Any) -> Awaitable[Any]:
        if not self._return_remapped_features:
            return NoWait(None)
        return self._managed_collision_collection.output_dist(ctx, ctx.remapped_kjt, ctx.features, self._places(ctx))

    def _places(self, ctx: Any) -> dict[str, Tensor] | None:
        """Feature -> position of each id among the ids that were sent; None: all were."""
        return None

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers in the backward of the tables, with this module's parameter names."""
        return CombinedOptimizer([(_EMBEDDINGS, self._embedding_module.fused_optimizer)])

    @property
    def shardings(self) -> dict[str, FeatureShardingMixIn]:
        """Sharding type -> its sharding."""
        return self._embedding_module.shardings

    def reset_parameters(self) -> None:
        """Initialise all tables again; all ranks must call this."""
        self._embedding_module.reset_parameters()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the tables' parameters and of all buffers of the managed collisions."""
        yield from self._embedding_module.sharded_parameter_names(append_prefix(prefix, _EMBEDDINGS))
        for name, _ in self._managed_collision_collection.named_buffers(append_prefix(prefix, _COLLISIONS)):
            yield name


class BaseManagedCollisionEmbeddingCollectionSharder(BaseEmbeddingSharder[M], abc.ABC, Generic[M]):
    """Base of the sharders of embedding collections with managed collisions.

    Args:
        e_sharder: shards the tables.
        mc_sharder: shards the managed collisions.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    def __init__(
        self,
        e_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(e_sharder.fused_params, qcomm_codecs_registry)
        self._e_sharder = e_sharder
        self._mc_sharder = mc_sharder

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name."""
        return embedding_parameters(module._embedding_module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """row_wise alone: each rank admits and evicts the ids of its own rows."""
        return [ShardingType.ROW_WISE.value]
