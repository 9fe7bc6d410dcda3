"""Sharded EmbeddingBagCollection and nn.EmbeddingBag for training, and their sharders.

Differs from TorchRec's on purpose: outputs keep the module's feature order, row pieces of MEAN tables divide by the
full bag, values that the given module holds are kept, and all tables but replicas share one exchange each way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from recinfer.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from recinfer.distributed.embedding_types import (
    BaseEmbeddingSharder,
    KJTList,
    ShardedEmbeddingModule,
    embedding_parameters,
)
from recinfer.distributed.sharding.collection import ShardedCollection
from recinfer.distributed.sharding.combine import JoinGroups
from recinfer.distributed.sharding.infos import by_sharding_type, table_infos
from recinfer.distributed.sharding.tables import PooledSharding
from recinfer.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    Multistreamable,
    NullShardedModuleContext,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType, dtype_to_data_type
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from recinfer.optim.fused import FusedOptimizer, FusedOptimizerModule
from recinfer.optim.keyed import KeyedOptimizer
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

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


def construct_output_kt(embeddings: list[Tensor], embedding_names: list[str], embedding_dims: list[int]) -> KeyedTensor:
    """Pooled vectors side by side, with their names.

    Args:
        embeddings: ``[B, ...]`` each; their columns are those of all names.
        embedding_names: the names, in order.
        embedding_dims: columns of each name.
    """
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor.from_parts_unchecked(embedding_names, embedding_dims, values)


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """Pooled vectors on their way: the KeyedTensor, once something uses it.

    Args:
        awaitables: of each group of tables, ``[B, columns of the group]``.
        embedding_dims: columns of each output.
        embedding_names: names of the outputs, in module order.
        join: how the groups' columns become the module's.
    """

    def __init__(
        self,
        awaitables: list[Awaitable[Tensor]],
        embedding_dims: list[int],
        embedding_names: list[str],
        join: JoinGroups,
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
class EmbeddingBagCollectionContext(Multistreamable):
    """What one forward carries between its steps.

    Args:
        sharding_contexts: one a group of tables that share their exchanges.
    """

    sharding_contexts: list[EmbeddingShardingContext | None] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` is done with them."""
        for context in self.sharding_contexts:
            if context is not None:
                context.record_stream(stream)


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
        prefix: where the tables are in the module, ``embedding_bags.``.
        fused_params: kernel settings of all tables.
        suffix: the name of a table's values.

    Returns:
        sharding type -> infos, tables in module order.

    Raises:
        ConfigError: a table has no plan, or the plan names one that is not there.
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
        device: where rows and buffers lie.
        permute_embeddings: accepted; outputs are always in module order.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.

    Raises:
        ConfigError: an unknown type, or tables of another one.
    """
    from recinfer.distributed.sharding.by_type import pooled_sharding_of

    return pooled_sharding_of(sharding_type)(sharding_infos, env, device, qcomm_codecs_registry)


def replace_placement_with_meta_device(sharding_infos: list[EmbeddingShardingInfo]) -> None:
    """Place every shard on the meta device, keeping its rank: for a plan of a real device and a module on meta."""
    for info in sharding_infos:
        for shard in getattr(info.param_sharding.sharding_spec, "shards", []):
            if shard.placement is not None:
                shard.placement._device = torch.device("meta")


class ShardedEmbeddingBagCollection(
    ShardedCollection[KJTList, list[Tensor], KeyedTensor, EmbeddingBagCollectionContext]
):
    """An EmbeddingBagCollection whose tables are cut over the ranks of a process group.

    Args:
        module: the collection. Values that it holds are taken over; on the meta device they are drawn, the same for any
            sharding when all ranks were seeded alike.
        table_name_to_parameter_sharding: the plan of every table.
        env: the ranks.
        fused_params: settings of the fused kernels, for example
            ``{"optimizer": OptimType.ROWWISE_ADAGRAD, "learning_rate": 0.1}``.
        device: where rows and buffers lie; default CPU.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
        weights_later: weights do not go with the ids; :meth:`send_weights` sends them before the lookup.

    ``forward(features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]``: each rank gives its own batch and gets the
    pooled vectors of it, ``[B, sum of dims]``, keys in module order. The gradient that reaches a row is the mean over
    the ranks of theirs.

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
        """State of one forward."""
        return EmbeddingBagCollectionContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Start moving ids to the ranks of their rows.

        Raises:
            MissingKeyError: a feature of the tables is not in ``features``.
            InputError: the tables take weights and there are none.
        """
        return self._begin(ctx, features)

    def send_weights(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor, dist_input: KJTList
    ) -> None:
        """Send the weights of ``features``, whose ids have gone already, to ``dist_input``; with gradients."""
        steps: Any = zip(self._input_dists, ctx.sharding_contexts, dist_input)
        for input_dist, context, received in steps:
            context.tie(received, input_dist.weights_in_order(features), None)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        """Look the local rectangles up: ``[B of all ranks, local columns]`` a group of tables."""
        return [lookup(features) for lookup, features in zip(self._lookups, dist_input)]

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Start moving pooled vectors to the ranks of their examples."""
        awaitables = [
            output_dist(embeddings, context)
            for output_dist, embeddings, context in zip(self._output_dists, output, ctx.sharding_contexts)
        ]
        return EmbeddingBagCollectionAwaitable(awaitables, self._dims, self._names, self._join)

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Both steps; a group's vectors are under way while the next one is looked up."""
        awaitables = [
            output_dist(lookup(features), context)
            for output_dist, lookup, features, context in zip(
                self._output_dists, self._lookups, input, ctx.sharding_contexts
            )
        ]
        return EmbeddingBagCollectionAwaitable(awaitables, self._dims, self._names, self._join)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, whole."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether ids come with weights."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):
    """Shards a float EmbeddingBagCollection.

    Args:
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """The sharded module, holding its values."""
        return ShardedEmbeddingBagCollection(
            module, params, env, self.fused_params, device, self.qcomm_codecs_registry, module_fqn
        )

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Tables by name."""
        return embedding_parameters(module)

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """What it shards."""
        return EmbeddingBagCollection


class EmbeddingAwaitable(LazyAwaitable[Tensor]):
    """The pooled vectors of one table on their way: the tensor, once something uses it.

    Args:
        awaitable: of the collection that the table is in.
    """

    def __init__(self, awaitable: LazyAwaitable[KeyedTensor]) -> None:
        super().__init__()
        self._awaitable = awaitable

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait().values()


_TABLE = "embedding_bag"  # name of the one table inside; also that of its feature


class ShardedEmbeddingBag(
    ShardedEmbeddingModule[KeyedJaggedTensor, Tensor, Tensor, NullShardedModuleContext], FusedOptimizerModule
):
    """An nn.EmbeddingBag whose rows or columns are cut over the ranks of a process group: a collection of one table.

    Parameter and state have the key of nn.EmbeddingBag, ``weight``.

    Args:
        module: mode sum or mean; no padding_idx, no max_norm.
        table_name_to_parameter_sharding: ``{"weight": plan}``.
        env: the ranks.
        fused_params: settings of the fused kernel.
        device: where rows and buffers lie; default CPU.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.

    ``forward(input, offsets=None, per_sample_weights=None) -> LazyAwaitable[Tensor]``, ``[B, D]``: ``input`` int
    ``[B, L]``, or ``[N]`` with ``offsets`` as nn.EmbeddingBag takes them.

    Raises:
        ConfigError: another mode, padding_idx or max_norm; a plan without ``weight``.
    """

    def __init__(
        self,
        module: nn.EmbeddingBag,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        if module.mode not in ("sum", "mean") or module.padding_idx is not None or module.max_norm is not None:
            raise ConfigError(
                f"EmbeddingBag with mode={module.mode!r}, padding_idx={module.padding_idx}, "
                f"max_norm={module.max_norm}; a sharded one has mode sum or mean and neither of the others"
            )
        if set(table_name_to_parameter_sharding) != {"weight"}:
            raise ConfigError(f"got a plan for {sorted(table_name_to_parameter_sharding)}; expected one for 'weight'")
        self._has_last_offset = module.include_last_offset
        # Weights are allowed with mode sum only, as nn.EmbeddingBag allows them.
        self._weighted = module.mode == "sum"
        plan = EmbeddingModuleShardingPlan({_TABLE: table_name_to_parameter_sharding["weight"]})
        # Kept out of the module tree: the names of this module are those of nn.EmbeddingBag.
        self._collection = [
            ShardedEmbeddingBagCollection(
                _as_collection(module, self._weighted), plan, env, fused_params, device, qcomm_codecs_registry
            )
        ]
        inner = self._collection[0].fused_optimizer
        named = dict(zip(["weight"], inner.params.values()))  # a dense table has none
        self._optim = _RenamedOptimizer(named, inner.state, inner.param_groups)

    def _state(self) -> nn.Module:
        return self._collection[0].get_submodule(f"embedding_bags.{_TABLE}")

    def create_context(self) -> NullShardedModuleContext:
        """State of one forward."""
        ctx = NullShardedModuleContext()
        ctx.inner = self._collection[0].create_context()  # type: ignore[attr-defined]
        return ctx

    def input_dist(
        self,
        ctx: NullShardedModuleContext,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start moving ids to the ranks of their rows.

        Raises:
            InputError: ``offsets`` that do not go with ``input``; weights with mode mean.
        """
        features = self._features(input, offsets, per_sample_weights)
        return _FirstOfTwo(self._collection[0].input_dist(ctx.inner, features))  # type: ignore[attr-defined]

    def _features(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> KeyedJaggedTensor:
        if (input.dim() == 1) == (offsets is None):
            raise InputError(
                f"got input of shape {tuple(input.shape)} {'without' if offsets is None else 'with'} offsets; "
                "expected [N] with offsets, or [B, L] without"
            )
        if weights is not None and not self._weighted:
            raise InputError("per_sample_weights with mode mean; nn.EmbeddingBag takes them with mode sum only")
        if offsets is None:
            ends = torch.arange(0, input.numel() + 1, max(input.shape[1], 1), device=input.device)
            offsets = ends if input.shape[1] else input.new_zeros(input.shape[0] + 1)
        elif not self._has_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), input.numel())])
        if self._weighted and weights is None:
            weights = torch.ones(input.numel(), device=input.device)
        return KeyedJaggedTensor(
            [_TABLE], input.reshape(-1), None if weights is None else weights.reshape(-1), offsets=offsets
        )

    def compute(self, ctx: NullShardedModuleContext, dist_input: KeyedJaggedTensor) -> Tensor:
        """Look the local rectangles up."""
        return self._collection[0].compute(ctx.inner, KJTList([dist_input]))[0]  # type: ignore[attr-defined]

    def output_dist(self, ctx: NullShardedModuleContext, output: Tensor) -> LazyAwaitable[Tensor]:
        """Start moving pooled vectors to the ranks of their examples."""
        return EmbeddingAwaitable(self._collection[0].output_dist(ctx.inner, [output]))  # type: ignore[attr-defined]

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that runs in the backward; its parameter is ``weight``."""
        return self._optim

    @property
    def shardings(self) -> dict[str, Any]:
        """Sharding type -> sharding."""
        return dict(self._collection[0].shardings)

    def reset_parameters(self) -> None:
        """Give the table new first values; every rank calls this."""
        self._collection[0].reset_parameters()

    # ---- names and state, as if the table were this module's own

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """``<prefix>weight``: a ShardedTensor, or the plain tensor of a replica."""
        result: dict[str, Any] = OrderedDict() if destination is None else destination
        self._state()._save_to_state_dict(result, prefix, keep_vars)
        return result

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Copy ``weight`` in; see :meth:`torch.nn.Module.load_state_dict`. ``assign`` is refused there."""
        return self._state().load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """``weight``, the local part (further column pieces are ``weight_1`` ...)."""
        yield from self._state().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Nothing."""
        yield from ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module alone."""
        yield from [(prefix, self)]

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """``weight``."""
        for name, _ in self.named_parameters(prefix):
            yield name


class _RenamedOptimizer(FusedOptimizer):
    """The optimizer of the one table, its parameter named as nn.EmbeddingBag names it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to do: the backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing to clear."""


class _FirstOfTwo(Awaitable[Any]):
    """The one KeyedJaggedTensor of an awaitable (of an awaitable) of a KJTList."""

    def __init__(self, awaitable: Awaitable[Any], depth: int = 2) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._depth = depth

    def _wait_impl(self) -> Any:
        value = self._awaitable.wait()
        return _FirstOfTwo(value, self._depth - 1) if self._depth > 1 else value[0]


def _as_collection(module: nn.EmbeddingBag, is_weighted: bool) -> EmbeddingBagCollection:
    """A collection of one table that shares the values of ``module`` and what is noted on its parameter."""
    config = EmbeddingBagConfig(
        module.num_embeddings,
        module.embedding_dim,
        _TABLE,
        data_type=dtype_to_data_type(module.weight.dtype),
        feature_names=[_TABLE],
        pooling=PoolingType[module.mode.upper()],
    )
    collection = EmbeddingBagCollection([config], is_weighted, torch.device("meta"))
    collection.embedding_bags[_TABLE].weight = module.weight
    return collection


class EmbeddingBagSharder(BaseEmbeddingSharder[nn.EmbeddingBag]):
    """Shards an nn.EmbeddingBag.

    Args:
        fused_params: settings of the fused kernel.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    def shard(
        self,
        module: nn.EmbeddingBag,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBag:
        """The sharded module, holding its values."""
        return ShardedEmbeddingBag(module, params, env, self.fused_params, device, self.qcomm_codecs_registry)

    def shardable_parameters(self, module: nn.EmbeddingBag) -> dict[str, nn.Parameter]:
        """``weight``."""
        return dict(module.named_parameters())

    @property
    def module_type(self) -> type[nn.EmbeddingBag]:
        """What it shards."""
        return nn.EmbeddingBag
