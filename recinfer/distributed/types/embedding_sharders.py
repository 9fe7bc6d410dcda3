"""Base sharders of embedding modules, float and quantized: the types, kernels and bytes that they offer a planner."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from recinfer.distributed.types.codecs import QuantizedCommCodecs
from recinfer.distributed.types.kernels import kernels_where, tier_of_rows
from recinfer.distributed.types.sharders import ModuleSharder
from recinfer.distributed.types.sharding_types import packed_sharding_types, types_where

__all__ = ["BaseEmbeddingSharder", "BaseQuantEmbeddingSharder", "embedding_parameters"]

M = TypeVar("M", bound=nn.Module)


def embedding_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Tables of an embedding module by table name, from keys ``embedding_bags.<table>.weight`` and the like."""
    return {
        name.split(".")[-2]: parameter
        for name, parameter in module.state_dict(keep_vars=True).items()
        if name.endswith(".weight") and name.count(".") >= 1
    }


class BaseEmbeddingSharder(ModuleSharder[M]):
    """Sharder of a float (training) embedding module.

    Args:
        fused_params: settings of the fused kernels (``optimizer``, ``learning_rate``, ``cache_load_factor`` ...).
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._fused_params = fused_params

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The offered sharding types: all types on a GPU, and the types without reduce-scatter on CPU."""
        types = types_where(lambda r: not r.cuts_rows and not (r.replicated and compute_device_type == "mtia"))
        if compute_device_type != "cpu":
            types += types_where(lambda r: r.cuts_rows)
        return types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``dense`` for data parallel, else the fused kernels; host-memory ones only with a GPU."""
        if sharding_type in types_where(lambda rule: rule.replicated):
            return kernels_where(lambda rule: rule.dense)
        return kernels_where(lambda rule: not (rule.packed or rule.dense) and compute_device_type in rule.devices)

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name."""
        return embedding_parameters(module)

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Settings of the fused kernels."""
        return self._fused_params

    def _settings(self) -> dict[str, Any]:
        """Arguments that this sharder passes to the sharded module."""
        return {"fused_params": self.fused_params, "qcomm_codecs_registry": self.qcomm_codecs_registry}

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of the float rows, by the memory in which the kernel keeps them."""
        return {tier_of_rows(compute_kernel, compute_device_type).name: tensor.element_size() * tensor.nelement()}


class BaseQuantEmbeddingSharder(ModuleSharder[M]):
    """Sharder of a quantized (inference) embedding module.

    Args:
        fused_params: settings of the quantized kernels.
        shardable_params: shard only these tables.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, shardable_params: list[str] | None = None) -> None:
        super().__init__()
        self._fused_params = dict(fused_params) if fused_params else None
        self._shardable_params = shardable_params or []

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, row-wise and column-wise."""
        return packed_sharding_types()

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``quant``, and the host-memory kernels with a GPU."""
        return kernels_where(lambda rule: rule.packed and compute_device_type in rule.devices)

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name; if ``shardable_params`` was given, only its tables."""
        tables = embedding_parameters(module)
        return {n: p for n, p in tables.items() if not self._shardable_params or n in self._shardable_params}

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Settings of the quantized kernels."""
        return self._fused_params

    def _settings(self) -> dict[str, Any]:
        """Arguments that this sharder passes to the sharded module."""
        return {"fused_params": self.fused_params}

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of the packed rows: the elements, and a 2-byte scale and bias per row."""
        num_bytes = tensor.element_size() * tensor.nelement() + tensor.shape[0] * 4
        return {tier_of_rows(compute_kernel, compute_device_type).name: num_bytes}
