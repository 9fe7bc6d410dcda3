"""Re-exports the enumerator, and the names that programs import with it, under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.planner.enumerator import EmbeddingEnumerator, option_object
from recinfer.distributed.planner.interfaces import Enumerator, ShardEstimator
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.options import Shard, ShardingOption
from recinfer.distributed.planner.model.options import partition_by_of as get_partition_by_type
from recinfer.distributed.planner.model.sharders import build_sharder_data_map, sharder_name
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from recinfer.distributed.types.kernels import EmbeddingComputeKernel

__all__ = [
    "EmbeddingComputeKernel",
    "EmbeddingEnumerator",
    "EmbeddingPerfEstimator",
    "EmbeddingStorageEstimator",
    "Enumerator",
    "ParameterConstraints",
    "Shard",
    "ShardEstimator",
    "ShardingOption",
    "Topology",
    "build_sharder_data_map",
    "get_partition_by_type",
    "option_object",
    "sharder_name",
]
