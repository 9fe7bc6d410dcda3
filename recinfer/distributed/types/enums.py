"""The enums of sharding: kernels, memories, devices, collectives."""

from __future__ import annotations

from enum import Enum, unique
from typing import NoReturn

from recinfer.errors import ConfigError

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CommOp",
    "ComputeDevice",
    "ComputeKernel",
    "EmbeddingComputeKernel",
    "EmbeddingLocation",
    "OptimType",
    "ParameterStorage",
    "PipelineType",
    "compute_kernel_to_embedding_location",
]


class PipelineType(Enum):
    """Training pipelines; they differ in how many batches of input are in memory at once."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


class ParameterStorage(Enum):
    """Memories that a planner distinguishes."""

    HBM = "hbm"
    DDR = "ddr"


class ComputeKernel(Enum):
    """The kernel of a module that is not an embedding module."""

    DEFAULT = "default"


class ComputeDevice(Enum):
    """Kinds of devices in a topology."""

    CUDA = "cuda"
    CPU = "cpu"
    MTIA = "mtia"


@unique
class CommOp(Enum):
    """Collectives that support codecs."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class CacheAlgorithm(Enum):
    """Eviction policy of the UVM cache."""

    LRU = 0
    LFU = 1


class BoundsCheckMode(Enum):
    """A lookup's treatment of ids outside their table (FBGEMM's values)."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3


@unique
class EmbeddingComputeKernel(Enum):
    """Kernels of tables, with the memory of their rows."""

    DENSE = "dense"  # nn.EmbeddingBag, gradients as tensors
    FUSED = "fused"  # batched lookup with the optimizer in the backward; rows on the device
    FUSED_UVM = "fused_uvm"  # FUSED with rows in host memory
    FUSED_UVM_CACHING = "fused_uvm_caching"  # FUSED with rows in host memory and a cache on the device
    QUANT = "quant"  # inference, packed rows on the device
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = ", ".join(kernel.value for kernel in cls)
        raise ConfigError(f"compute kernel {value!r} is not supported; expected one of: {known}")


@unique
class EmbeddingLocation(Enum):
    """Memory of a table's rows (FBGEMM's values)."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3


@unique
class OptimType(Enum):
    """Optimizers of fused kernels."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"
    SHAMPOO = "SHAMPOO"
    LION = "LION"


def compute_kernel_to_embedding_location(compute_kernel: EmbeddingComputeKernel) -> EmbeddingLocation:
    """The memory of a kernel's rows: the device, host memory, or host memory behind a device cache."""
    if compute_kernel.value.endswith("_uvm_caching"):
        return EmbeddingLocation.MANAGED_CACHING
    if compute_kernel.value.endswith("_uvm"):
        return EmbeddingLocation.MANAGED
    return EmbeddingLocation.DEVICE
