"""Re-exports DistributedModelParallel and its helpers under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.sharded.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from recinfer.distributed.sharded.model_parallel import DistributedModelParallel, get_module, get_unwrapped_module
from recinfer.distributed.types import ShardedModule
from recinfer.distributed.types.default_sharders import get_default_sharders

__all__ = [
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "ShardedModule",
    "get_default_sharders",
    "get_module",
    "get_unwrapped_module",
]
