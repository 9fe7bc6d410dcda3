"""Re-exports plans written by hand and the default sharders under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.sharded.plan_generators import (
    ParameterShardingGenerator,
    apply_to_all,
    calculate_shard_sizes_and_offsets,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_sharding_constructor_from_type,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from recinfer.distributed.types.default_sharders import get_default_sharders, get_module_to_default_sharders
from recinfer.distributed.types.edges import placement

__all__ = [
    "ParameterShardingGenerator",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_default_sharders",
    "get_module_to_default_sharders",
    "get_sharding_constructor_from_type",
    "grid_shard",
    "placement",
    "row_wise",
    "table_row_wise",
    "table_wise",
]
