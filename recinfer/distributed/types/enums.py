"""The enums of sharding: memories, devices, collectives, optimizers."""

from __future__ import annotations

from enum import Enum, unique

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CommOp",
    "ComputeDevice",
    "ComputeKernel",
    "OptimType",
    "ParameterStorage",
    "PipelineType",
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
