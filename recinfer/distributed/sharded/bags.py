"""Sharded EmbeddingBagCollection for training, and its sharder.

Intended differences from TorchRec: outputs keep the module's feature order, row pieces of MEAN tables divide by the
full bag, values of the given module are kept, and all tables except replicas share one exchange in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.exchange.combine import JoinShardings
from recinfer.distributed.sharded.collection import ShardedCollection
from recinfer.distributed.sharded.infos import by_sharding_type, table_infos
from recinfer.distributed.sharded.sharding import PooledSharding
from recinfer.distributed.sharded.typed_sharder import TypedSharder
from recinfer.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.shardings import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    ShardedCollectionContext,
)
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "EmbeddingBagCollectionAwaitable",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionSharder",
    "ShardedEmbeddingBagCollection",
    "construct_output_kt",
    "create_embedding_bag_sharding",
    "create_sharding_infos_by_sharding",
    "replace_placement_with_meta_device",
]


def construct_output_kt(embeddings: list[Tensor], embedding_names: list[str], embedding_dims: list[int]) -> KeyedTensor:
    """A KeyedTensor of concatenated pooled vectors.

    Args:
        embeddings: ``[B, ...]`` each; their columns are those of all names.
        embedding_names: the names, in order.
        embedding_dims: columns of each name.
    """
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor.from_parts_unchecked(embedding_names, embedding_dims, values)


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """Awaitable of pooled vectors, which waits when the KeyedTensor is first used.

    Args:
        awaitables: for each sharding, ``[B, columns of the sharding]``.
        embedding_dims: columns of each output.
        embedding_names: names of the outputs, in module order.
        join: maps the shardings' columns to the module's.
    """

    def __init__(
        self,
        awaitables: list[Awaitable[Tensor]],
        embedding_dims: list[int],
        embedding_names: list[str],
        join: JoinShardings,
    ) -> None:
        super().__init__()
        self._awaitables = awaitables
        self._embedding_dims = embedding_dims
        self._embedding_names = embedding_names
        self._join = join

    def _wait_impl(self) -> KeyedTensor:
        values = self._join([awaitable.wait() for awaitable in self._awaitables])
        return construct_output_kt([values], self._embedding_names, self._embedding_dims)


@dataclass
class EmbeddingBagCollectionContext(ShardedCollectionContext[EmbeddingShardingContext | None]):
    """Data that one forward passes between its steps: a context for each sharding."""


def create_sharding_infos_by_sharding(
    module: EmbeddingBagCollectionInterface,
    table_name_to_parameter_sharding: dict[str, ParameterSharding],
    prefix: str,
    fused_params: dict[str, Any] | None,
    suffix: str | None = "weight",
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a module by sharding type.

    Args:
        module: the collection.
        table_name_to_parameter_sharding: the plan.
        prefix: prefix of the tables' names in the module, ``embedding_bags.``.
        fused_params: kernel settings of all tables.
        suffix: the name of a table's values.

    Returns:
        sharding type -> infos, tables in module order.

    Raises:
        ConfigError: a table has no plan, or the plan names a table that does not exist.
    """
    return by_sharding_type(_infos(module, table_name_to_parameter_sharding, fused_params, prefix, suffix or "weight"))


def _infos(
    module: EmbeddingBagCollectionInterface,
    plan: dict[str, ParameterSharding],
    fused_params: dict[str, Any] | None,
    prefix: str = "embedding_bags.",
    suffix: str = "weight",
) -> list[EmbeddingShardingInfo]:
    state = module.state_dict(keep_vars=True)
    configs = module.embedding_bag_configs()
    parameters = {config.name: state[f"{prefix}{config.name}.{suffix}"] for config in configs}
    return table_infos(configs, parameters, plan, fused_params, module.is_weighted())


def create_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    permute_embeddings: bool = False,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Any]:
    """The sharding of pooled tables of one type.

    Args:
        sharding_type: a ``ShardingType`` value.
        sharding_infos: the tables.
        env: the ranks.
        device: device of rows and buffers.
        permute_embeddings: has no effect (:mod:`recinfer.ignored`): outputs are always in module order.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.

    Raises:
        ConfigError: an unknown type, or tables of another one.
    """
    from recinfer.distributed.sharded.by_type import pooled_sharding_of

    return pooled_sharding_of(sharding_type)(sharding_infos, env, device, qcomm_codecs_registry)


def _create_mean_pooling_divisor(lengths: Tensor, stride: int, embedding_dims: Sequence[int], **_: Any) -> Tensor:
    """The number by which the caller divides each element of ``[B, sum(D)]`` pooled vectors: 1, since lookups divide MEAN
    bags themselves. A name that programs written for TorchRec import."""
    return torch.ones((stride, sum(embedding_dims)), device=lengths.device)


def replace_placement_with_meta_device(sharding_infos: list[EmbeddingShardingInfo]) -> None:
    """Place every shard on the meta device, keeping its rank: for a plan of a real device and a module on meta."""
    for info in sharding_infos:
        for shard in getattr(info.param_sharding.sharding_spec, "shards", []):
            if shard.placement is not None:
                shard.placement._device = torch.device("meta")


class ShardedEmbeddingBagCollection(ShardedCollection[KeyedTensor, EmbeddingBagCollectionContext]):
    """An EmbeddingBagCollection whose tables are sharded over the ranks of a process group.

    Args:
        module: the collection. The collection's values are kept. Values on the meta device are initialised, with the
            same values for any sharding if all ranks have the same seed.
        table_name_to_parameter_sharding: the plan of every table.
        env: the ranks.
        fused_params: settings of the fused kernels, for example
            ``{"optimizer": OptimType.ROWWISE_ADAGRAD, "learning_rate": 0.1}``.
        device: device of rows and buffers; default CPU.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
        weights_later: weights are not sent with the ids; :meth:`send_weights` sends them before the lookup.

    ``forward(features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]``: each rank passes its own batch and gets the
    pooled vectors of it, ``[B, sum of dims]``, keys in module order. The gradient of a row is the mean of the ranks'
    gradients.

    Raises:
        ConfigError: a table has no plan, or its shards do not tile it.
    """

    tables_attribute = "embedding_bags"
    sharding_class = PooledSharding

    def __init__(
        self,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
        weights_later: bool = False,
    ) -> None:
        infos = _infos(module, table_name_to_parameter_sharding, fused_params)
        super().__init__(infos, env, device, qcomm_codecs_registry, weights_later)
        self._embedding_bag_configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self.module_sharding_plan = table_name_to_parameter_sharding

    def create_context(self) -> EmbeddingBagCollectionContext:
        """A new context for one forward."""
        return EmbeddingBagCollectionContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Start sending ids to the ranks that hold their rows.

        Raises:
            MissingKeyError: a feature of the tables is not in ``features``.
            InputError: a key occurs twice, or the tables need weights and there are none.
        """
        return self._begin(ctx, features)

    def send_weights(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor, dist_input: KJTList
    ) -> None:
        """Send the weights of ``features``, whose ids have gone already, to ``dist_input``; with gradients."""
        steps: Any = zip(self._input_dists, ctx.sharding_contexts, dist_input)
        for input_dist, context, received in steps:
            context.connect_weights(received, input_dist.weights_in_order(features), None)

    def _outputs(
        self, ctx: EmbeddingBagCollectionContext, awaitables: list[Awaitable[Tensor]]
    ) -> LazyAwaitable[KeyedTensor]:
        return EmbeddingBagCollectionAwaitable(awaitables, self._dims, self._names, self._join)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the unsharded tables."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether ids come with weights."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(
    BaseEmbeddingSharder[EmbeddingBagCollection], TypedSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]
):
    """Shards a float EmbeddingBagCollection.

    Args:
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    _takes, _makes = EmbeddingBagCollection, ShardedEmbeddingBagCollection
