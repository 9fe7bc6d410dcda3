"""The sharder of the float FeatureProcessedEmbeddingBagCollection: what the planner may do with its tables."""

from __future__ import annotations

import torch

from recinfer.distributed.embedding_types import BaseEmbeddingSharder
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from recinfer.errors import UnavailableError
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["FeatureProcessedEmbeddingBagCollectionSharder"]


class FeatureProcessedEmbeddingBagCollectionSharder(BaseEmbeddingSharder[FeatureProcessedEmbeddingBagCollection]):
    """Sharding types and kernels of a float FeatureProcessedEmbeddingBagCollection, for planning.

    Args:
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    @property
    def module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """What it shards."""
        return FeatureProcessedEmbeddingBagCollection

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> torch.nn.Module:
        """Raises UnavailableError: this version plans float tables for training but shards only quantized ones."""
        raise UnavailableError(
            "sharding float FeatureProcessedEmbeddingBagCollection for training is not in this version; quantize the module and use the "
            "sharders of recinfer.distributed.quant_embeddingbag and quant_embedding"
        )
