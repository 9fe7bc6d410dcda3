"""Configs of sharded tables: a shard of a table, and the shards that one kernel call looks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from recinfer.distributed.types.kernels import EmbeddingComputeKernel
from recinfer.modules.embedding_configs import DataType, EmbeddingTableConfig, PoolingType

__all__ = [
    "EmbeddingAttributes",
    "GroupedEmbeddingConfig",
    "ShardedConfig",
    "ShardedEmbeddingTable",
    "ShardedMetaConfig",
]


@dataclass
class ShardedConfig:
    """Size of a local shard."""

    local_rows: int = 0
    local_cols: int = 0


@dataclass
class ShardedMetaConfig(ShardedConfig):
    """A local shard and its position in the whole table."""

    local_metadata: ShardMetadata | None = None
    global_metadata: ShardedTensorMetadata | None = None


@dataclass
class EmbeddingAttributes:
    """Kernel and memory of a local shard."""

    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.DENSE


@dataclass
class ShardedEmbeddingTable(ShardedMetaConfig, EmbeddingAttributes, EmbeddingTableConfig):
    """One shard of one table: its config, its rectangle and its kernel."""

    fused_params: dict[str, Any] | None = None


@dataclass
class GroupedEmbeddingConfig:
    """Shards that one kernel call looks up together: they have the same element type, pooling, weighting and kernel."""

    data_type: DataType
    pooling: PoolingType
    is_weighted: bool
    has_feature_processor: bool
    compute_kernel: EmbeddingComputeKernel
    embedding_tables: list[ShardedEmbeddingTable]
    fused_params: dict[str, Any] | None = None

    def feature_hash_sizes(self) -> list[int]:
        """Number of rows of each feature's table."""
        return [t.num_embeddings for t in self.embedding_tables for _ in t.feature_names]

    def num_features(self) -> int:
        """Number of features of all tables."""
        return sum(t.num_features() for t in self.embedding_tables)

    def dim_sum(self) -> int:
        """Sum of the local columns of all features."""
        return sum(self.embedding_dims())

    def table_names(self) -> list[str]:
        """Names of the tables, in order."""
        return [t.name for t in self.embedding_tables]

    def feature_names(self) -> list[str]:
        """Names of the features, table by table."""
        return [f for t in self.embedding_tables for f in t.feature_names]

    def embedding_dims(self) -> list[int]:
        """Local columns of each feature."""
        return [t.local_cols for t in self.embedding_tables for _ in t.feature_names]

    def embedding_names(self) -> list[str]:
        """Output names, one per feature."""
        return [n for t in self.embedding_tables for n in t.embedding_names]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Metadata of the shard that each feature reads."""
        return [t.local_metadata for t in self.embedding_tables for _ in t.feature_names]
