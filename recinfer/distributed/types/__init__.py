"""Types of sharding: enums, plans, sharders, awaitables and communication codecs.

Names, fields and values are TorchRec's (``torchrec.distributed.types``), so code for TorchRec works after renaming the
package. Importing it initialises no device or process group.
"""

from __future__ import annotations

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardingSpec

from recinfer.distributed.types.awaitables import (
    Awaitable,
    GenericMeta,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
)
from recinfer.distributed.types.cache import (
    CacheParams,
    CacheStatistics,
)
from recinfer.distributed.types.codecs import (
    NoOpQuantizedCommCodec,
    QuantizedCommCodec,
    QuantizedCommCodecs,
)
from recinfer.distributed.types.enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    CommOp,
    ComputeDevice,
    ComputeKernel,
    ParameterStorage,
    PipelineType,
)
from recinfer.distributed.types.modules import (
    NullShardedModuleContext,
    NullShardingContext,
    ShardedModule,
)
from recinfer.distributed.types.plans import (
    EmbeddingModuleShardingPlan,
    KeyValueParams,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    rank_device,
)
from recinfer.distributed.types.sharders import (
    ModuleSharder,
    ShardingPlanner,
)
from recinfer.distributed.types.sharding_types import ShardingType
from recinfer.modules.embedding_configs import DataType
from recinfer.streamable import Multistreamable

__all__ = [
    "Awaitable",
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CacheParams",
    "CacheStatistics",
    "CommOp",
    "ComputeDevice",
    "ComputeKernel",
    "DataType",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "GenericMeta",
    "KeyValueParams",
    "LazyAwaitable",
    "LazyNoWait",
    "ModuleSharder",
    "ModuleShardingPlan",
    "Multistreamable",
    "NoOpQuantizedCommCodec",
    "NoWait",
    "NullShardedModuleContext",
    "NullShardingContext",
    "ParameterSharding",
    "ParameterStorage",
    "PipelineType",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
    "Shard",
    "ShardMetadata",
    "ShardedModule",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "ShardingType",
    "rank_device",
]
