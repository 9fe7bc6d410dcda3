"""Kernel settings of a table, merged from the optimizer in its backward, its plan and its sharder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recinfer.distributed.fused_params import canonical_names
from recinfer.distributed.types import ParameterSharding
from recinfer.distributed.types.enums import OptimType
from recinfer.errors import ConfigError

__all__ = [
    "add_params_from_parameter_sharding",
    "has_optimizer_in_backward",
    "merge_fused_params",
    "optimizer_fused_params",
    "optimizer_type_to_emb_opt_type",
]

# By class name, which is the same in torch.optim, recinfer.optim and TorchRec. A class of this name elsewhere may have
# another formula.
_PACKAGES = frozenset({"torch", "recinfer", "torchrec"})
_OPTIMIZERS = {
    "SGD": OptimType.SGD,
    "LarsSGD": OptimType.LARS_SGD,
    "LAMB": OptimType.LAMB,
    "PartialRowWiseLAMB": OptimType.PARTIAL_ROWWISE_LAMB,
    "Adam": OptimType.ADAM,
    "AdamW": OptimType.ADAM,
    "PartialRowWiseAdam": OptimType.PARTIAL_ROWWISE_ADAM,
    "Adagrad": OptimType.ADAGRAD,
    "RowWiseAdagrad": OptimType.ROWWISE_ADAGRAD,
}
# Arguments of the classes that the formulas of fused kernels have.
_NUMBERS = frozenset({"learning_rate", "eps", "beta1", "beta2", "weight_decay", "momentum", "eta"})
# Optimizers whose torch classes add weight_decay * w to the gradient; kernels do so in the mode L2 only.
_L2 = frozenset({OptimType.SGD, OptimType.ADAGRAD, OptimType.ROWWISE_ADAGRAD})


def optimizer_type_to_emb_opt_type(optimizer_class: type) -> OptimType:
    """The fused optimizer that computes the update of an optimizer class.

    Raises:
        ConfigError: no fused optimizer computes it.
    """
    found = _OPTIMIZERS.get(optimizer_class.__name__)
    if found is None or optimizer_class.__module__.partition(".")[0] not in _PACKAGES:
        name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        raise ConfigError(
            f"optimizer {name} has no fused kernel; expected one of torch.optim or recinfer.optim: "
            f"{', '.join(_OPTIMIZERS)}. Or plan the table with the kernel dense, and step its parameter yourself"
        )
    return found


def has_optimizer_in_backward(parameter: Any) -> bool:
    """Whether apply_optimizer_in_backward was called for ``parameter``."""
    return bool(getattr(parameter, "_optimizer_classes", None))


def optimizer_fused_params(parameter: Any, fused_params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``fused_params``, updated with the optimizer that apply_optimizer_in_backward noted on ``parameter``, if it did.

    Numbers that neither gives are the defaults of the optimizer's class, where those of FBGEMM differ: the learning
    rate of torch.optim.Adam is 0.001, that of ``{"optimizer": "ADAM"}`` 0.01.

    Raises:
        ConfigError: several optimizers, one without a fused kernel, or a weight decay with another formula than the
            kernel's.
    """
    classes = getattr(parameter, "_optimizer_classes", None) or []
    if not classes:
        return dict(fused_params or {})
    if len(classes) > 1:
        names = [c.__name__ for c in classes]
        raise ConfigError(f"a table has optimizers {names} in its backward; a fused kernel supports only one")
    kwargs = dict((getattr(parameter, "_optimizer_kwargs", None) or [{}])[0])
    optimizer = optimizer_type_to_emb_opt_type(classes[0])
    # TorchRec's classes that only name a kernel keep no defaults.
    defaults = canonical_names(getattr(classes[0]([nn.Parameter(torch.empty(1, 1))], **kwargs), "defaults", {}))
    settings = {
        **{name: value for name, value in defaults.items() if name in _NUMBERS},
        **canonical_names(fused_params),
        **canonical_names(kwargs),
        "optimizer": optimizer,
    }
    if settings.pop("decoupled_weight_decay", defaults.get("decoupled_weight_decay")) is False and settings.get(
        "weight_decay"
    ):
        raise ConfigError(
            f"torch.optim.Adam adds weight_decay={settings['weight_decay']} * w to the gradient, and no fused kernel does: "
            "use torch.optim.AdamW, which the kernel of ADAM computes (also in TorchRec, for Adam), leave weight_decay "
            "out, or plan the table with the kernel dense"
        )
    if kwargs.get("weight_decay") and optimizer in _L2:
        settings["weight_decay_mode"] = kwargs.get("weight_decay_mode", "L2")
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in settings.items()}


def add_params_from_parameter_sharding(
    fused_params: dict[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """``fused_params`` updated with the kernel settings of a table's plan."""
    given: dict[str, Any] = {
        "enforce_hbm": parameter_sharding.enforce_hbm,
        "stochastic_rounding": parameter_sharding.stochastic_rounding,
        "bounds_check_mode": parameter_sharding.bounds_check_mode,
        "output_dtype": parameter_sharding.output_dtype,
    }
    cache = parameter_sharding.cache_params
    if cache is not None:
        given |= {
            "cache_algorithm": cache.algorithm,
            "cache_load_factor": cache.load_factor,
            "cache_reserved_memory": cache.reserved_memory,
            "cache_precision": cache.precision,
            "prefetch_pipeline": cache.prefetch_pipeline,
            "multipass_prefetch_config": cache.multipass_prefetch_config,
        }
    return {**(fused_params or {}), **{name: value for name, value in given.items() if value is not None}}


def merge_fused_params(
    fused_params: dict[str, Any] | None = None, param_fused_params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The settings of all tables, updated with those of one table."""
    return {**(fused_params or {}), **(param_fused_params or {})}
