"""Plans as plain data: rectangles of tables on ranks, JSON, and a hash."""

from __future__ import annotations

from recinfer.distributed.planner.model.walk import embedding_tables
from recinfer.distributed.planner.plan.plan import MAX_RANKS, Plan, PlanChange
from recinfer.distributed.planner.plan.table_plan import ShardRect, TablePlan

__all__ = ["MAX_RANKS", "Plan", "PlanChange", "ShardRect", "TablePlan", "embedding_tables"]
