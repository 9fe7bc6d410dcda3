"""Re-exports the planner's types under TorchRec's module name (``torchrec.distributed.planner.types``)."""

from __future__ import annotations

from recinfer.distributed.planner.interfaces import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    ShardEstimator,
    Stats,
    StorageReservation,
)
from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.links import BasicCommsBandwidths, CollectiveType, GeneralizedCommsBandwidth
from recinfer.distributed.planner.model.options import Shard, ShardingOption
from recinfer.distributed.planner.model.sharders import SharderData, SharderDataMap, StorageUsageType
from recinfer.distributed.planner.model.topology import CustomTopologyData, DeviceHardware, Perf, Storage, Topology
from recinfer.distributed.types import ShardingPlan
from recinfer.distributed.types.sharding_types import PartitionByType

__all__ = [
    "BasicCommsBandwidths",
    "CollectiveType",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PlanLoader",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "SharderData",
    "SharderDataMap",
    "ShardingOption",
    "ShardingPlan",
    "Stats",
    "Storage",
    "StorageReservation",
    "StorageUsageType",
    "Topology",
]
