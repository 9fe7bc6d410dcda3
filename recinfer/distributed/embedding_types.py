"""Compute kernels, configs of sharded tables, and base sharders of embedding modules.

Names, fields and values are TorchRec's (``torchrec.distributed.embedding_types``).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from recinfer.distributed.types import (
    DataType,
    ModuleSharder,
    ParameterStorage,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingType,
)
from recinfer.distributed.types.enums import (
    EmbeddingComputeKernel,
    EmbeddingLocation,
    OptimType,
    compute_kernel_to_embedding_location,
)
from recinfer.distributed.types.kjt_lists import KJTList, ListOfKJTList
from recinfer.modules.embedding_configs import EmbeddingTableConfig, PoolingType

if TYPE_CHECKING:
    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

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
    "compute_kernel_to_embedding_location",
    "embedding_parameters",
]

F = TypeVar("F")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")

_UVM_KERNELS = frozenset({"fused_uvm", "fused_uvm_caching", "quant_uvm", "quant_uvm_caching"})


# --------------------------------------------------------------------------------------------------- table configs


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


# --------------------------------------------------------------------------------------------------- interfaces


class FeatureShardingMixIn:
    """Interface of a sharding that lists its features, by rank."""

    def feature_names(self) -> list[str]:
        """All features."""
        raise NotImplementedError(f"{type(self).__name__} must implement feature_names")

    def feature_names_per_rank(self) -> list[list[str]]:
        """Features of each rank."""
        raise NotImplementedError(f"{type(self).__name__} must implement feature_names_per_rank")

    def features_per_rank(self) -> list[int]:
        """How many features each rank has."""
        raise NotImplementedError(f"{type(self).__name__} must implement features_per_rank")


class ModuleShardingMixIn:
    """Interface of a sharded module that gives access to its shardings."""

    @property
    def shardings(self) -> dict[str, FeatureShardingMixIn]:
        """Sharding type -> sharding."""
        raise NotImplementedError(f"{type(self).__name__} must implement shardings")


class BaseEmbeddingLookup(abc.ABC, nn.Module, Generic[F, T]):
    """Interface of a lookup in the local shards."""

    @abc.abstractmethod
    def forward(self, sparse_features: F) -> T:
        """Vectors of ``sparse_features``."""


class BaseGroupedFeatureProcessor(nn.Module):
    """Interface of a processor that changes features, for example their weights, before the lookup."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The processed features."""


class ShardedEmbeddingModule(
    ShardedModule[CompIn, DistOut, Out, ShrdCtx], ModuleShardingMixIn, Generic[CompIn, DistOut, Out, ShrdCtx]
):
    """Base of sharded embedding modules: inputs and outputs are data-parallel, tables are sharded."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self._input_dists: list[nn.Module] = []
        self._lookups: list[nn.Module] = []
        self._output_dists: list[nn.Module] = []

    def extra_repr(self) -> str:
        """Representation of the steps, which are not submodules."""
        steps = (("input_dist", self._input_dists), ("lookup", self._lookups), ("output_dist", self._output_dists))
        return "\n".join(f"({name}): {module!r}" for name, modules in steps for module in modules)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, also for the lookups, which are not submodules."""
        super().train(mode)
        for lookup in self._lookups:
            lookup.train(mode)
        return self

    def prefetch(self, dist_input: Any, forward_stream: Any = None, ctx: Any = None) -> None:
        """Load the rows of a coming batch into the caches of the lookups that have one."""
        for features, lookup in zip(dist_input, self._lookups):
            prefetch = getattr(lookup, "prefetch", None)
            if prefetch is not None:
                prefetch(sparse_features=features, forward_stream=forward_stream)

    def flush(self) -> None:
        """Write changed rows from the caches back to the tables, so that they can be read there."""
        self._tell_caches("flush")

    def purge(self) -> None:
        """Drop the contents of all caches, after the rows of the tables were overwritten. Changed rows that were not
        flushed are lost."""
        self._tell_caches("purge")

    def drop_prefetched(self) -> None:
        """Drop batches that were prefetched and not looked up, in all caches."""
        self._tell_caches("drop_prefetched")

    def _tell_caches(self, what: str) -> None:
        for lookup in self._lookups:
            tell = getattr(lookup, what, None)
            if tell is not None:
                tell()


# --------------------------------------------------------------------------------------------------- sharders

_ON_DEVICE = [EmbeddingComputeKernel.FUSED.value]
_ON_HOST = [EmbeddingComputeKernel.FUSED_UVM.value, EmbeddingComputeKernel.FUSED_UVM_CACHING.value]


def embedding_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Tables of an embedding module by table name, from keys ``embedding_bags.<table>.weight`` and the like."""
    return {
        name.split(".")[-2]: parameter
        for name, parameter in module.state_dict(keep_vars=True).items()
        if name.endswith(".weight") and name.count(".") >= 1
    }


def _storage_of(compute_device_type: str, compute_kernel: str) -> str:
    on_host = compute_device_type == "cpu" or compute_kernel in _UVM_KERNELS
    return (ParameterStorage.DDR if on_host else ParameterStorage.HBM).value


class BaseEmbeddingSharder(ModuleSharder[M]):
    """Sharder of a float (training) embedding module.

    Args:
        fused_params: settings of the fused kernels (``optimizer``, ``learning_rate``, ``cache_load_factor`` ...).
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._fused_params = fused_params

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The offered sharding types: all types on a GPU, and the types without reduce-scatter on CPU."""
        types = [ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE]
        if compute_device_type != "mtia":
            types.insert(0, ShardingType.DATA_PARALLEL)
        if compute_device_type != "cpu":
            types += [ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD]
        return [t.value for t in types]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``dense`` for data parallel, else the fused kernels; host-memory ones only with a GPU."""
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return [EmbeddingComputeKernel.DENSE.value]
        return _ON_DEVICE + (_ON_HOST if compute_device_type == "cuda" else [])

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name."""
        return embedding_parameters(module)

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Settings of the fused kernels."""
        return self._fused_params

    def _settings(self) -> dict[str, Any]:
        """Arguments that this sharder passes to the sharded module."""
        return {"fused_params": self.fused_params, "qcomm_codecs_registry": self.qcomm_codecs_registry}

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of the float rows, by the memory in which the kernel keeps them."""
        return {_storage_of(compute_device_type, compute_kernel): tensor.element_size() * tensor.nelement()}


class BaseQuantEmbeddingSharder(ModuleSharder[M]):
    """Sharder of a quantized (inference) embedding module.

    Args:
        fused_params: settings of the quantized kernels.
        shardable_params: shard only these tables.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, shardable_params: list[str] | None = None) -> None:
        super().__init__()
        self._fused_params = dict(fused_params) if fused_params else None
        self._shardable_params = shardable_params or []

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, row-wise and column-wise."""
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value, ShardingType.COLUMN_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``quant``, and the host-memory kernels with a GPU."""
        kernels = [EmbeddingComputeKernel.QUANT.value]
        if compute_device_type == "cuda":
            kernels += [EmbeddingComputeKernel.QUANT_UVM.value, EmbeddingComputeKernel.QUANT_UVM_CACHING.value]
        return kernels

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name; if ``shardable_params`` was given, only its tables."""
        tables = embedding_parameters(module)
        return {n: p for n, p in tables.items() if not self._shardable_params or n in self._shardable_params}

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Settings of the quantized kernels."""
        return self._fused_params

    def _settings(self) -> dict[str, Any]:
        """Arguments that this sharder passes to the sharded module."""
        return {"fused_params": self.fused_params}

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of the packed rows: the elements, and a 2-byte scale and bias per row."""
        num_bytes = tensor.element_size() * tensor.nelement() + tensor.shape[0] * 4
        return {_storage_of(compute_device_type, compute_kernel): num_bytes}
