"""The planner: it assigns rectangles of tables to ranks and kernels. See docs/explanation/request.md.

Three folders, each of which may import those before it: ``model`` has the inputs (hardware, tables, estimates of
shards), ``plan`` has plans as data, ``solve`` searches for a plan. The modules next to them are the public interface,
most with TorchRec's names.
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
    from recinfer.distributed.planner.sharding_planner import EmbeddingShardingPlanner, create_planner
    from recinfer.distributed.planner.units import bytes_to_gb

# Lazy imports: serving reads plans and needs no search.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EmbeddingShardingPlanner": "recinfer.distributed.planner.sharding_planner",
        "ParameterConstraints": "recinfer.distributed.planner.model.constraints",
        "Plan": "recinfer.distributed.planner.plan",
        "PlannerError": "recinfer.distributed.planner.model.constraints",
        "ShardRect": "recinfer.distributed.planner.plan",
        "TablePlan": "recinfer.distributed.planner.plan",
        "Topology": "recinfer.distributed.planner.model.topology",
        "bytes_to_gb": "recinfer.distributed.planner.units",
        "create_planner": "recinfer.distributed.planner.sharding_planner",
        "plan_inference": "recinfer.distributed.planner.inference",
        "sharder_name": "recinfer.distributed.planner.model.sharders",
    },
)
