"""Replication of the unsharded part of a model: the interface, and its implementation by DistributedDataParallel."""

from __future__ import annotations

import abc
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from recinfer.distributed.sharded.model_tree import sharded_parameter_names
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import ConfigError

__all__ = ["DataParallelWrapper", "DefaultDataParallelWrapper", "Wrappable"]

_COMPRESSION = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Wrappable(Protocol):
    """The part of DistributedModelParallel that a wrapper uses: the running model, which it may replace."""

    _dmp_wrapped_module: nn.Module


class DataParallelWrapper(abc.ABC):
    """Replicates the part of a model that is not sharded."""

    @abc.abstractmethod
    def wrap(self, dmp: Wrappable, env: ShardingEnv, device: torch.device) -> None:
        """Set ``dmp._dmp_wrapped_module`` to a module around it that averages the gradients."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """Wraps all parameters that are not sharded in one DistributedDataParallel.

    Args:
        bucket_cap_mb: size of a gradient bucket in MiB.
        static_graph: every step uses the same parameters.
        find_unused_parameters: look for parameters without a gradient in every step; not with ``static_graph``.
        allreduce_comm_precision: "fp16" or "bf16" halves the bytes of sent gradients; None sends them unchanged.
        params_to_ignore: names of further parameters that are not replicated.
        ddp_kwargs: further arguments of DistributedDataParallel.

    Raises:
        ConfigError: an unknown precision.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: list[str] | None = None,
        ddp_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision is not None and allreduce_comm_precision not in _COMPRESSION:
            raise ConfigError(
                f"allreduce_comm_precision: got {allreduce_comm_precision!r}; expected one of {sorted(_COMPRESSION)} "
                "or None"
            )
        self._bucket_cap_mb = bucket_cap_mb
        self._static_graph = static_graph
        self._find_unused_parameters = find_unused_parameters
        self._allreduce_comm_precision = allreduce_comm_precision
        self._params_to_ignore = set(params_to_ignore or ())
        self._ddp_kwargs = dict(ddp_kwargs or {})

    def wrap(self, dmp: Wrappable, env: ShardingEnv, device: torch.device) -> None:
        """Wrap once; a model without parameters to average is not changed."""
        if env.process_group is None or isinstance(dmp._dmp_wrapped_module, DistributedDataParallel):
            return
        module = dmp._dmp_wrapped_module
        sharded = set(sharded_parameter_names(module))
        left = [n for n, p in module.named_parameters() if n not in sharded and p.requires_grad]
        ignored = sharded | self._params_to_ignore
        if not set(left) - ignored:
            return
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(ignored))
        wrapped = DistributedDataParallel(
            module=module,
            device_ids=None if device.type == "cpu" else [device],
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
            static_graph=self._static_graph,
            find_unused_parameters=self._find_unused_parameters,
            bucket_cap_mb=self._bucket_cap_mb,
            **self._ddp_kwargs,
        )
        if self._allreduce_comm_precision is not None:
            wrapped.register_comm_hook(None, _COMPRESSION[self._allreduce_comm_precision])
        dmp._dmp_wrapped_module = wrapped
