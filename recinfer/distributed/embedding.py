"""The sharder of the float EmbeddingCollection: what the planner may do with its tables."""

from __future__ import annotations

import torch

from recinfer.distributed.embedding_types import BaseEmbeddingSharder
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingType
from recinfer.errors import UnavailableError
from recinfer.modules.embedding_modules import EmbeddingCollection

__all__ = ["EmbeddingCollectionSharder"]


class EmbeddingCollectionSharder(BaseEmbeddingSharder[EmbeddingCollection]):
    """Sharding types and kernels of a float EmbeddingCollection, for planning.

    Args:
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        """What it shards."""
        return EmbeddingCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Types that keep one vector an id: no host-wise ones."""
        types = (
            ShardingType.DATA_PARALLEL,
            ShardingType.TABLE_WISE,
            ShardingType.COLUMN_WISE,
            ShardingType.ROW_WISE,
        )
        return [t.value for t in types]

    def shard(
        self,
        module: EmbeddingCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> torch.nn.Module:
        """Raises UnavailableError: this version plans float tables for training but shards only quantized ones."""
        raise UnavailableError(
            "sharding float EmbeddingCollection for training is not in this version; quantize the module and use the "
            "sharders of recinfer.distributed.quant_embeddingbag and quant_embedding"
        )
