"""TypedSharder: base of sharders from one class of modules to one class of sharded modules."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from recinfer.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingEnv

__all__ = ["TypedSharder"]

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S")


class TypedSharder(ModuleSharder[M], Generic[M, S]):
    """Mix-in that builds the sharded module; another base class defines sharding types and settings.

    A subclass sets ``_takes`` and ``_makes``, whose constructor takes module, plan, ranks, device and the settings.
    """

    _takes: type[M]
    _makes: Callable[..., S]

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Keyword arguments of the sharded module."""

    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> S:
        """The sharded module, holding its values."""
        return self._makes(module, params, env, device=device, **self._settings())

    @property
    def module_type(self) -> type[M]:
        """The class of modules that this sharder shards."""
        return self._takes
