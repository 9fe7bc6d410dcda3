"""Sharded nn.EmbeddingBag for training, a collection of one table, and its sharder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from recinfer.distributed.sharded.bags import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from recinfer.distributed.sharded.typed_sharder import TypedSharder
from recinfer.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from recinfer.distributed.types.embedding_modules import ShardedEmbeddingModule
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType, dtype_to_data_type
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.fused import FusedOptimizer, FusedOptimizerModule
from recinfer.optim.keyed import KeyedOptimizer
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["EmbeddingAwaitable", "EmbeddingBagSharder", "ShardedEmbeddingBag"]


class EmbeddingAwaitable(LazyAwaitable[Tensor]):
    """Awaitable of the pooled vectors of one table, which waits when the tensor is first used.

    Args:
        awaitable: awaitable of the table's collection.
    """

    def __init__(self, awaitable: LazyAwaitable[KeyedTensor]) -> None:
        super().__init__()
        self._awaitable = awaitable

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait().values()


_TABLE = "embedding_bag"  # name of the only table, and of its feature


class ShardedEmbeddingBag(
    ShardedEmbeddingModule[KeyedJaggedTensor, Tensor, Tensor, EmbeddingBagCollectionContext], FusedOptimizerModule
):
    """A sharded nn.EmbeddingBag over the ranks of a process group, implemented as a collection of one table.

    Parameter and state have the key of nn.EmbeddingBag, ``weight``.

    Args:
        module: mode sum or mean; no padding_idx, no max_norm.
        table_name_to_parameter_sharding: ``{"weight": plan}``.
        env: the ranks.
        fused_params: settings of the fused kernel.
        device: device of rows and buffers; default CPU.
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
                f"max_norm={module.max_norm}; sharding supports mode sum or mean, without padding_idx and max_norm"
            )
        if set(table_name_to_parameter_sharding) != {"weight"}:
            raise ConfigError(f"got a plan for {sorted(table_name_to_parameter_sharding)}; expected one for 'weight'")
        self._has_last_offset = module.include_last_offset
        # Weights are allowed with mode sum only, as in nn.EmbeddingBag.
        self._weighted = module.mode == "sum"
        plan = EmbeddingModuleShardingPlan({_TABLE: table_name_to_parameter_sharding["weight"]})
        # The inner collection is kept out of the module tree, so that this module has the names of nn.EmbeddingBag.
        self._collection = [
            ShardedEmbeddingBagCollection(
                _as_collection(module, self._weighted), plan, env, fused_params, device, qcomm_codecs_registry
            )
        ]
        self._lookups = self._collection[0]._lookups
        inner = self._collection[0].fused_optimizer
        named = dict(zip(["weight"], inner.params.values()))  # a dense table has none
        self._optim = _RenamedOptimizer(named, inner.state, inner.param_groups)

    def _state(self) -> nn.Module:
        return self._collection[0].get_submodule(f"embedding_bags.{_TABLE}")

    def create_context(self) -> EmbeddingBagCollectionContext:
        """A new context for one forward."""
        return self._collection[0].create_context()

    def input_dist(
        self,
        ctx: EmbeddingBagCollectionContext,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start sending ids to the ranks that hold their rows.

        Raises:
            InputError: ``offsets`` that do not fit ``input``; weights with mode mean.
        """
        features = self._features(input, offsets, per_sample_weights)
        return _FirstOfList(self._collection[0].input_dist(ctx, features))

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

    def prefetch(
        self,
        dist_input: KeyedJaggedTensor,
        forward_stream: Any = None,
        ctx: EmbeddingBagCollectionContext | None = None,
    ) -> None:
        """Load the rows of a coming batch into the lookup's cache, if it has one."""
        self._collection[0].prefetch(KJTList([dist_input]), forward_stream)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KeyedJaggedTensor) -> Tensor:
        """Look up the local shards."""
        return self._collection[0].compute(ctx, KJTList([dist_input]))[0]

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: Tensor) -> LazyAwaitable[Tensor]:
        """Start sending pooled vectors to the ranks of their examples."""
        return EmbeddingAwaitable(self._collection[0].output_dist(ctx, [output]))

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that runs in the backward; its parameter is ``weight``."""
        return self._optim

    @property
    def shardings(self) -> dict[str, Any]:
        """Sharding type -> sharding."""
        return dict(self._collection[0].shardings)

    def reset_parameters(self) -> None:
        """Initialise the table again; all ranks must call this."""
        self._collection[0].reset_parameters()

    # ---- names and state, as if the table were this module's own

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """``<prefix>weight``: a ShardedTensor, or the plain tensor of a replica."""
        result: dict[str, Any] = OrderedDict() if destination is None else destination
        self.flush()
        self._state()._save_to_state_dict(result, prefix, keep_vars)
        return result

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Copy ``weight`` in; see :meth:`torch.nn.Module.load_state_dict`. ``assign`` is an error."""
        self.flush()
        self.purge()
        return self._state().load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """``weight``, the local part (further column pieces are ``weight_1`` ...)."""
        yield from self._state().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """No buffers."""
        yield from ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module, without its inner collection."""
        yield from [(prefix, self)]

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """``weight``."""
        for name, _ in self.named_parameters(prefix):
            yield name


class _RenamedOptimizer(FusedOptimizer):
    """The optimizer of the only table, with nn.EmbeddingBag's name for its parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No effect: the backward has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """No effect: there are no gradients."""


class _FirstOfList(Awaitable[Any]):
    """Awaitable of the first KeyedJaggedTensor of a KJTList, which ``depth`` nested awaitables return."""

    def __init__(self, awaitable: Awaitable[Any], depth: int = 2) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._depth = depth

    def _wait_impl(self) -> Any:
        value = self._awaitable.wait()
        return _FirstOfList(value, self._depth - 1) if self._depth > 1 else value[0]


def _as_collection(module: nn.EmbeddingBag, is_weighted: bool) -> EmbeddingBagCollection:
    """A collection of one table that shares the values of ``module`` and the attributes of its parameter."""
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


class EmbeddingBagSharder(BaseEmbeddingSharder[nn.EmbeddingBag], TypedSharder[nn.EmbeddingBag, ShardedEmbeddingBag]):
    """Shards an nn.EmbeddingBag.

    Args:
        fused_params: settings of the fused kernel.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    _takes, _makes = nn.EmbeddingBag, ShardedEmbeddingBag

    def shardable_parameters(self, module: nn.EmbeddingBag) -> dict[str, nn.Parameter]:
        """``weight``."""
        return dict(module.named_parameters())
