"""The planner: which rank holds which rectangle of which table, on which kernel. See docs/tour.md."""

from __future__ import annotations

from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan
from recinfer.distributed.planner.types import ParameterConstraints, Topology

__all__ = ["ParameterConstraints", "Plan", "ShardRect", "TablePlan", "Topology", "plan_inference"]
