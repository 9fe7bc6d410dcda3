"""Re-exports helpers of the planner under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.planner.model.sharders import build_sharder_data_map, sharder_name
from recinfer.distributed.planner.units import (
    bytes_to_gb,
    bytes_to_mb,
    gb_to_bytes,
    prod,
)
from recinfer.distributed.types.edges import placement

__all__ = [
    "build_sharder_data_map",
    "bytes_to_gb",
    "bytes_to_mb",
    "gb_to_bytes",
    "placement",
    "prod",
    "sharder_name",
]
