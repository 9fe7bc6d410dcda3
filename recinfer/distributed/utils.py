"""Re-exports helpers of the sharded modules under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.sharded.copying import sharded_model_copy
from recinfer.distributed.sharded.kernel_settings import (
    add_params_from_parameter_sharding,
    has_optimizer_in_backward,
    merge_fused_params,
    optimizer_fused_params,
    optimizer_type_to_emb_opt_type,
)
from recinfer.distributed.sharded.model_tree import get_unsharded_module_names
from recinfer.module_tree import append_prefix, filter_state_dict

__all__ = [
    "add_params_from_parameter_sharding",
    "append_prefix",
    "filter_state_dict",
    "get_unsharded_module_names",
    "has_optimizer_in_backward",
    "merge_fused_params",
    "optimizer_fused_params",
    "optimizer_type_to_emb_opt_type",
    "sharded_model_copy",
]
