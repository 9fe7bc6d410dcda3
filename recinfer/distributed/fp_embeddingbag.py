"""Sharded FeatureProcessedEmbeddingBagCollection for training, and its sharder.

Processors are replicated and run on each rank's own batch; their weights are sent after the ids, in an exchange with
gradients. Every processor thus works with every sharding type, and a pipeline that sends ids ahead still uses the
newest weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.distributed.sharded.bags import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from recinfer.distributed.sharded.typed_sharder import TypedSharder
from recinfer.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from recinfer.distributed.types.embedding_modules import FeatureShardingMixIn, ShardedEmbeddingModule
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder, embedding_parameters
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.sharding_types import types_where
from recinfer.module_tree import append_prefix
from recinfer.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from recinfer.optim.fused import FusedOptimizerModule
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["FeatureProcessedEmbeddingBagCollectionSharder", "ShardedFeatureProcessedEmbeddingBagCollection"]


@dataclass
class _Context(EmbeddingBagCollectionContext):
    """The tables' context, and the ids that need weights."""

    features: KeyedJaggedTensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""
        super().record_stream(stream)
        if self.features is not None:
            self.features.record_stream(stream)  # type: ignore[arg-type]


class ShardedFeatureProcessedEmbeddingBagCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], KeyedTensor, _Context], FusedOptimizerModule
):
    """Feature processors, replicated, in front of a sharded EmbeddingBagCollection.

    The processors' parameters are not among :meth:`sharded_parameter_names`: the data-parallel wrapper averages their
    gradients, as for any replicated parameter.

    Args:
        module: the collection with its processors; its values are kept.
        table_name_to_parameter_sharding: the plan of every table.
        env: the ranks.
        fused_params: settings of the fused kernels.
        device: device of rows and buffers; default CPU.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.

    Raises:
        ConfigError: a table has no plan, or its shards do not tile it.
    """

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        place = torch.device(device) if device is not None else torch.device("cpu")
        self._embedding_bag_collection = ShardedEmbeddingBagCollection(
            module.embedding_bag_collection(),
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
            module_fqn,
            weights_later=True,
        )
        self._feature_processors = _on(module._feature_processors, place)
        inner = self._embedding_bag_collection
        self._input_dists = inner._input_dists
        self._lookups = inner._lookups
        self._output_dists = inner._output_dists

    def create_context(self) -> _Context:
        """A new context for one forward."""
        return _Context()

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Start moving ids to the ranks of their rows; their weights are computed later, in :meth:`compute`.

        Raises:
            MissingKeyError: a feature of the tables is not in ``features``.
            InputError: a key occurs twice.
        """
        ctx.features = features
        return self._embedding_bag_collection.input_dist(ctx, features)

    def _weigh(self, ctx: _Context, dist_input: KJTList) -> KJTList:
        assert ctx.features is not None, "call input_dist before compute"
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processed = apply_feature_processors_to_kjt(ctx.features, processors)  # type: ignore[arg-type]
        else:
            processed = processors(ctx.features)
        self._embedding_bag_collection.send_weights(ctx, processed, dist_input)
        return dist_input

    def compute(self, ctx: _Context, dist_input: KJTList) -> list[Tensor]:
        """Compute the weights of the ids, and look up the local shards.

        Raises:
            InputError: a bag that its processor does not accept.
        """
        return self._embedding_bag_collection.compute(ctx, self._weigh(ctx, dist_input))

    def output_dist(self, ctx: _Context, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Start sending pooled vectors to the ranks of their examples."""
        return self._embedding_bag_collection.output_dist(ctx, output)

    def compute_and_output_dist(self, ctx: _Context, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Run :meth:`compute` and :meth:`output_dist`."""
        return self._embedding_bag_collection.compute_and_output_dist(ctx, self._weigh(ctx, input))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers in the backward of the tables, with this module's parameter names."""
        return CombinedOptimizer([("_embedding_bag_collection", self._embedding_bag_collection.fused_optimizer)])

    @property
    def shardings(self) -> dict[str, FeatureShardingMixIn]:
        """Sharding type -> its sharding."""
        return self._embedding_bag_collection.shardings

    def reset_parameters(self) -> None:
        """Initialise all tables again; all ranks must call this."""
        self._embedding_bag_collection.reset_parameters()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the tables' parameters, without those of the processors."""
        yield from self._embedding_bag_collection.sharded_parameter_names(
            append_prefix(prefix, "_embedding_bag_collection")
        )


def _on(processors: nn.Module, device: torch.device) -> nn.Module:
    """Move ``module`` to ``device``; processors without values are initialised."""
    if not any(parameter.is_meta for parameter in processors.parameters()):
        return processors.to(device)
    processors = processors.to_empty(device=device)
    for part in processors.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
    return processors


class FeatureProcessedEmbeddingBagCollectionSharder(
    BaseEmbeddingSharder[FeatureProcessedEmbeddingBagCollection],
    TypedSharder[FeatureProcessedEmbeddingBagCollection, ShardedFeatureProcessedEmbeddingBagCollection],
):
    """Shards a float FeatureProcessedEmbeddingBagCollection.

    Args:
        ebc_sharder: its settings are those of the tables; default: one with ``fused_params``.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
        fused_params: settings of the fused kernels.
    """

    _takes, _makes = FeatureProcessedEmbeddingBagCollection, ShardedFeatureProcessedEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        if ebc_sharder is not None:
            fused_params = ebc_sharder.fused_params
            qcomm_codecs_registry = qcomm_codecs_registry or ebc_sharder.qcomm_codecs_registry
        super().__init__(fused_params, qcomm_codecs_registry)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types of tables without processors, and cuts by rows on every device, which planners use if
        constraints ask for them."""
        offered = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*offered, *types_where(lambda rule: rule.cuts_rows)]))

    def shardable_parameters(self, module: FeatureProcessedEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Tables by name, without the processors."""
        return embedding_parameters(module.embedding_bag_collection())
