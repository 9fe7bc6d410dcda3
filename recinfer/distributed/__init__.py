"""Sharding of models over ranks: the planner, sharded modules, training pipelines. See docs/explanation/request.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recinfer.lazy import lazy_names

__all__ = [
    "Awaitable",
    "DataLoadingThread",
    "DistributedModelParallel",
    "EvalPipelineSparseDist",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "ShardedModule",
    "ShardedTensor",
    "ShardingEnv",
    "ShardingPlanner",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "get_local_rank",
    "get_local_size",
    "get_unsharded_module_names",
    "sharded_model_copy",
]

if TYPE_CHECKING:
    from recinfer.distributed.comm.ranks import get_local_rank, get_local_size
    from recinfer.distributed.sharded.copying import sharded_model_copy
    from recinfer.distributed.sharded.model_parallel import DistributedModelParallel
    from recinfer.distributed.sharded.model_tree import get_unsharded_module_names
    from recinfer.distributed.train_pipeline import (
        DataLoadingThread,
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipeline,
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )
    from recinfer.distributed.types import (
        Awaitable,
        ModuleSharder,
        NoWait,
        ParameterSharding,
        ShardedModule,
        ShardedTensor,
        ShardingEnv,
        ShardingPlanner,
    )

# Imports are lazy, because every module below this package imports it first, also modules that need no kernels.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Awaitable": "recinfer.distributed.types",
        "DataLoadingThread": "recinfer.distributed.train_pipeline",
        "DistributedModelParallel": "recinfer.distributed.model_parallel",
        "EvalPipelineSparseDist": "recinfer.distributed.train_pipeline",
        "ModuleSharder": "recinfer.distributed.types",
        "NoWait": "recinfer.distributed.types",
        "ParameterSharding": "recinfer.distributed.types",
        "PrefetchTrainPipelineSparseDist": "recinfer.distributed.train_pipeline",
        "ShardedModule": "recinfer.distributed.types",
        "ShardedTensor": "recinfer.distributed.types",
        "ShardingEnv": "recinfer.distributed.types",
        "ShardingPlanner": "recinfer.distributed.types",
        "TrainPipeline": "recinfer.distributed.train_pipeline",
        "TrainPipelineBase": "recinfer.distributed.train_pipeline",
        "TrainPipelineSparseDist": "recinfer.distributed.train_pipeline",
        "get_local_rank": "recinfer.distributed.comm.ranks",
        "get_local_size": "recinfer.distributed.comm.ranks",
        "get_unsharded_module_names": "recinfer.distributed.sharded.model_tree",
        "sharded_model_copy": "recinfer.distributed.sharded.copying",
    },
    modules=("planner", "train_pipeline", "types"),
)
