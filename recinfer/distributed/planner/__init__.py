"""The planner: which rank holds which rectangle of which table, on which kernel. See docs/tour.md."""

from __future__ import annotations

from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan
from recinfer.distributed.planner.planners import EmbeddingShardingPlanner, create_planner
from recinfer.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from recinfer.distributed.planner.utils import bytes_to_gb, sharder_name

__all__ = [
    "EmbeddingShardingPlanner",
    "ParameterConstraints",
    "Plan",
    "PlannerError",
    "ShardRect",
    "TablePlan",
    "Topology",
    "bytes_to_gb",
    "create_planner",
    "plan_inference",
    "sharder_name",
]
