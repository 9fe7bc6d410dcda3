"""Shared by all sharding types: table infos, contexts, and interfaces of the steps."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from recinfer.distributed.types.awaitables import Awaitable
from recinfer.distributed.types.codecs import QuantizedCommCodecs
from recinfer.distributed.types.embedding_modules import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    FeatureShardingMixIn,
)
from recinfer.distributed.types.plans import ParameterSharding
from recinfer.distributed.types.tables import ShardedEmbeddingTable
from recinfer.modules.embedding_configs import EmbeddingTableConfig
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.streamable import Multistreamable

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata

__all__ = [
    "BaseEmbeddingDist",
    "BaseSparseFeaturesDist",
    "EmbeddingSharding",
    "EmbeddingShardingContext",
    "EmbeddingShardingInfo",
    "Sent",
    "ShardedCollectionContext",
]

C = TypeVar("C", bound=Multistreamable)
F = TypeVar("F")
T = TypeVar("T")
W = TypeVar("W")
EachContext = TypeVar("EachContext", bound="EmbeddingShardingContext | None")


@dataclass
class EmbeddingShardingInfo:
    """A table and its sharding.

    Args:
        embedding_config: the table; its ``embedding_names`` name the outputs.
        param_sharding: the plan of the table.
        param: the table's values, or a meta tensor.
        fused_params: settings of the fused kernel.
    """

    embedding_config: EmbeddingTableConfig
    param_sharding: ParameterSharding
    param: Tensor
    fused_params: dict[str, Any] | None = None

    def names(self) -> list[str]:
        """Names of the outputs, one per feature."""
        return list(self.embedding_config.embedding_names or self.embedding_config.feature_names)


@dataclass
class Sent:
    """How the sent ids were derived from the input ids.

    Attributes:
        sizes: ids of each slot, in the order sent.
        cut_sizes: ids of each cut feature; empty when nothing is cut.
        bucket_sizes: ids of each (bucket, cut feature).
        permute: ``[ids of the cut features]``: the position of each among the bucketized ids.
    """

    sizes: list[int] = field(default_factory=list)
    cut_sizes: list[int] = field(default_factory=list)
    bucket_sizes: list[int] = field(default_factory=list)
    permute: Tensor | None = None


@dataclass
class EmbeddingShardingContext(Multistreamable):
    """Data that one forward passes from the input exchange to the output exchange.

    Args:
        batch_size_per_rank: examples that each rank sent.
        batch_size_per_rank_per_feature: variable batch: for each rank the batch size of each received feature.
        batch_size_per_feature_pre_a2a: variable batch: batch size of each feature sent, in the order sent.
        variable_batch_per_feature: whether features have separate batch sizes.
    """

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] = field(default_factory=list)
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    variable_batch_per_feature: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""

    def sent(self, features: KeyedJaggedTensor, ids: Sent) -> None:
        """Record the sent ``features``, in the order sent, and how their ids were derived from the input."""
        self.variable_batch_per_feature = features.variable_stride_per_key()
        if self.variable_batch_per_feature:
            self.batch_size_per_feature_pre_a2a = features.stride_per_key()

    def sizes_known(self, awaitable: Any) -> None:
        """Record the exchanged sizes from ``awaitable``, the awaitable of the tensors."""
        strides = getattr(awaitable, "stride_per_rank", None)
        if strides is not None:
            self.batch_size_per_rank = list(strides)

    def received(self, features: KeyedJaggedTensor, awaitable: Any = None) -> None:
        """Record the ``features`` that ``awaitable`` received."""
        if features.variable_stride_per_key():
            self.variable_batch_per_feature = True
            per_key = features.stride_per_key_per_rank()
            self.batch_size_per_rank_per_feature = [list(sizes) for sizes in zip(*per_key)]
        elif not self.batch_size_per_rank:
            self.batch_size_per_rank = [features.stride()]


@dataclass
class ShardedCollectionContext(Multistreamable, Generic[EachContext]):
    """Data that one forward of a sharded collection passes between its steps.

    Args:
        sharding_contexts: one per sharding.
    """

    sharding_contexts: list[EachContext] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""
        for context in self.sharding_contexts:
            if context is not None:
                context.record_stream(stream)


class BaseSparseFeaturesDist(abc.ABC, nn.Module, Generic[F]):
    """Interface of the input exchange, which sends features to the ranks that hold their rows."""

    @abc.abstractmethod
    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[F]] | F:
        """Start sending ``sparse_features``; the first wait is for sizes, the second for the features."""


class BaseEmbeddingDist(abc.ABC, nn.Module, Generic[C, T, W]):
    """Interface of the output exchange, which sends looked-up vectors to the ranks of their examples."""

    @abc.abstractmethod
    def forward(self, local_embs: T, sharding_ctx: C | None = None) -> Awaitable[W] | W:
        """Start sending ``local_embs``."""


class EmbeddingSharding(abc.ABC, FeatureShardingMixIn, Generic[C, F, T, W]):
    """A set of tables that are sharded together; creates the three steps and describes the shards.

    Args:
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """``CommOp`` name -> codecs."""
        return self._qcomm_codecs_registry

    @abc.abstractmethod
    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[F]:
        """Create the input exchange."""

    @abc.abstractmethod
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[C, T, W]:
        """Create the output exchange."""

    @abc.abstractmethod
    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[F, T]:
        """Create the lookup, which owns this rank's rows."""

    @abc.abstractmethod
    def embedding_dims(self) -> list[int]:
        """Columns of each output, in the order of :meth:`embedding_names`."""

    @abc.abstractmethod
    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Metadata of the shard of each name of :meth:`embedding_names_per_rank`, rank by rank."""

    @abc.abstractmethod
    def embedding_names(self) -> list[str]:
        """Names of the outputs."""

    @abc.abstractmethod
    def embedding_names_per_rank(self) -> list[list[str]]:
        """Names of the outputs that each rank computes a part of, one for each shard and feature."""

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards on this rank. The method is not abstract, as in TorchRec."""
        raise NotImplementedError(f"{type(self).__name__} must implement embedding_tables")
