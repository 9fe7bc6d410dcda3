"""Re-exports kernels, configs of sharded tables and base sharders of embedding modules under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.types.embedding_modules import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    FeatureShardingMixIn,
    ModuleShardingMixIn,
    ShardedEmbeddingModule,
)
from recinfer.distributed.types.embedding_sharders import (
    BaseEmbeddingSharder,
    BaseQuantEmbeddingSharder,
    embedding_parameters,
)
from recinfer.distributed.types.enums import OptimType
from recinfer.distributed.types.kernels import (
    EmbeddingComputeKernel,
    EmbeddingLocation,
    compute_kernel_to_embedding_location,
)
from recinfer.distributed.types.kjt_lists import KJTList, ListOfKJTList
from recinfer.distributed.types.sharding_types import ShardingType
from recinfer.distributed.types.tables import (
    EmbeddingAttributes,
    GroupedEmbeddingConfig,
    ShardedConfig,
    ShardedEmbeddingTable,
    ShardedMetaConfig,
)

__all__ = [
    "BaseEmbeddingLookup",
    "BaseEmbeddingSharder",
    "BaseGroupedFeatureProcessor",
    "BaseQuantEmbeddingSharder",
    "EmbeddingAttributes",
    "EmbeddingComputeKernel",
    "EmbeddingLocation",
    "FeatureShardingMixIn",
    "GroupedEmbeddingConfig",
    "KJTList",
    "ListOfKJTList",
    "ModuleShardingMixIn",
    "OptimType",
    "ShardedConfig",
    "ShardedEmbeddingModule",
    "ShardedEmbeddingTable",
    "ShardedMetaConfig",
    "ShardingType",
    "compute_kernel_to_embedding_location",
    "embedding_parameters",
]
