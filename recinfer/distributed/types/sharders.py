"""Interfaces of sharders and planners."""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from recinfer.distributed.types.codecs import QuantizedCommCodecs
from recinfer.distributed.types.enums import ComputeKernel
from recinfer.distributed.types.plans import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from recinfer.distributed.types.sharding_types import ShardingType
from recinfer.distributed.types.tiers import near_tier

__all__ = [
    "ModuleSharder",
    "ShardingPlanner",
]


M = TypeVar("M", bound=nn.Module)


class ModuleSharder(abc.ABC, Generic[M]):
    """Base of sharders for one class of modules: parameters, sharding types and kernels that it supports.

    Args:
        qcomm_codecs_registry: ``CommOp`` name -> codecs of that collective.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @abc.abstractmethod
    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Build the sharded module that ``params`` describes, on ``device``."""

    @property
    @abc.abstractmethod
    def module_type(self) -> type[M]:
        """The class of modules this sharder takes."""

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """``CommOp`` name -> codecs."""
        return self._qcomm_codecs_registry

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Parameters that can be sharded, by name."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Supported sharding types on a device; only data_parallel in this base class."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Supported kernels for a sharding type on a device."""
        return [ComputeKernel.DEFAULT.value]

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of ``tensor`` by storage tier (``hbm`` or ``ddr``)."""
        return {near_tier(compute_device_type).name: tensor.element_size() * tensor.nelement()}


class ShardingPlanner(abc.ABC):
    """Interface of planners."""

    @abc.abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan, computed in this process."""

    @abc.abstractmethod
    def collective_plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan of rank 0, on every rank."""
