"""Re-exports the planner, and the names that programs import with it, under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.planner.enumerator import EmbeddingEnumerator
from recinfer.distributed.planner.interfaces import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    Stats,
    StorageReservation,
)
from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.partitioners import GreedyPerfPartitioner
from recinfer.distributed.planner.perf_models import NoopPerfModel
from recinfer.distributed.planner.planner_base import EmbeddingPlannerBase, to_sharding_plan
from recinfer.distributed.planner.proposers import GreedyProposer, UniformProposer
from recinfer.distributed.planner.sharding_planner import EmbeddingShardingPlanner, create_planner
from recinfer.distributed.planner.stats import EmbeddingStats
from recinfer.distributed.planner.storage_reservations import HeuristicalStorageReservation
from recinfer.distributed.types import ShardingPlan

__all__ = [
    "EmbeddingEnumerator",
    "EmbeddingPlannerBase",
    "EmbeddingShardingPlanner",
    "EmbeddingStats",
    "Enumerator",
    "GreedyPerfPartitioner",
    "GreedyProposer",
    "HeuristicalStorageReservation",
    "NoopPerfModel",
    "ParameterConstraints",
    "Partitioner",
    "PerfModel",
    "PlanLoader",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "ShardingOption",
    "ShardingPlan",
    "Stats",
    "StorageReservation",
    "Topology",
    "UniformProposer",
    "create_planner",
    "to_sharding_plan",
]
