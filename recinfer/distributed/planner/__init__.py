"""The planner: which rank holds which rectangle of which table, on which kernel. See docs/explanation/request.md.

Three folders, each of which imports those before it: ``model`` says what there is to plan (the hardware, the tables, what
a shard takes), ``plan`` is a plan as data, ``solve`` finds one. The modules beside them are the ways in, most at the places
where TorchRec has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recinfer.lazy import lazy_names

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

if TYPE_CHECKING:
    from recinfer.distributed.planner.inference import plan_inference
    from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError
    from recinfer.distributed.planner.model.sharders import sharder_name
    from recinfer.distributed.planner.model.topology import Topology
    from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan
    from recinfer.distributed.planner.planners import EmbeddingShardingPlanner, create_planner
    from recinfer.distributed.planner.utils import bytes_to_gb

# Lazy: what serves reads plans, and needs no search.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EmbeddingShardingPlanner": "recinfer.distributed.planner.planners",
        "ParameterConstraints": "recinfer.distributed.planner.model.constraints",
        "Plan": "recinfer.distributed.planner.plan",
        "PlannerError": "recinfer.distributed.planner.model.constraints",
        "ShardRect": "recinfer.distributed.planner.plan",
        "TablePlan": "recinfer.distributed.planner.plan",
        "Topology": "recinfer.distributed.planner.model.topology",
        "bytes_to_gb": "recinfer.distributed.planner.utils",
        "create_planner": "recinfer.distributed.planner.planners",
        "plan_inference": "recinfer.distributed.planner.inference",
        "sharder_name": "recinfer.distributed.planner.model.sharders",
    },
)
