"""Shared by all sharding types: table infos, contexts, interfaces of the steps, and awaitables of exchanged
features."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from recinfer.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    FeatureShardingMixIn,
    KJTList,
    ListOfKJTList,
    ShardedEmbeddingTable,
)
from recinfer.distributed.exchange.kjt import KJTSplitsAllToAllMeta, SplitsAllToAllAwaitable, check_forms, form_of
from recinfer.distributed.exchange.tensors import KJTAllToAllTensorsAwaitable
from recinfer.distributed.tables.grouping import bucketize_kjt_before_all2all, group_tables
from recinfer.distributed.types import Awaitable, Multistreamable, ParameterSharding, QuantizedCommCodecs
from recinfer.modules.embedding_configs import EmbeddingTableConfig
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed._shard.metadata import ShardMetadata

__all__ = [
    "BaseEmbeddingDist",
    "BaseSparseFeaturesDist",
    "EmbeddingSharding",
    "EmbeddingShardingContext",
    "EmbeddingShardingInfo",
    "FusedKJTListSplitsAwaitable",
    "KJTListAwaitable",
    "KJTListSplitsAwaitable",
    "KJTSplitsAllToAllMeta",
    "ListOfKJTListAwaitable",
    "ListOfKJTListSplitsAwaitable",
    "bucketize_kjt_before_all2all",
    "group_tables",
]

C = TypeVar("C", bound=Multistreamable)
F = TypeVar("F")
T = TypeVar("T")
W = TypeVar("W")
EachContext = TypeVar("EachContext", bound="EmbeddingShardingContext | None")


# --------------------------------------------------------------------------------------------------- infos and contexts


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


# --------------------------------------------------------------------------------------------------- steps


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


# --------------------------------------------------------------------------------------------------- awaitables


class KJTListAwaitable(Awaitable[KJTList]):
    """Awaitable of the features of several shardings.

    Args:
        awaitables: one per sharding.
        ctx: received data is recorded in its ``sharding_contexts``.
    """

    def __init__(self, awaitables: list[Awaitable[KeyedJaggedTensor]], ctx: C) -> None:
        super().__init__()
        self.awaitables = awaitables
        self.ctx = ctx

    def _wait_impl(self) -> KJTList:
        features = [awaitable.wait() for awaitable in self.awaitables]
        for context, received, awaitable in zip(_contexts(self.ctx), features, self.awaitables):
            if isinstance(context, EmbeddingShardingContext):
                context.received(received, awaitable)
        return KJTList(features)


class KJTListSplitsAwaitable(Awaitable[Awaitable[KJTList]], Generic[C]):
    """Awaitable of the sizes of several shardings' features; its result is a :class:`KJTListAwaitable`.

    Args:
        awaitables: one per sharding.
        ctx: sizes are recorded in its ``sharding_contexts``.
    """

    def __init__(self, awaitables: list[Awaitable[Awaitable[KeyedJaggedTensor]]], ctx: C) -> None:
        super().__init__()
        self.awaitables = awaitables
        self.ctx = ctx

    def _wait_impl(self) -> KJTListAwaitable:
        return _record_sizes([awaitable.wait() for awaitable in self.awaitables], self.ctx)


def _contexts(ctx: Any) -> Iterable[Any]:
    return ctx.sharding_contexts if isinstance(ctx, ShardedCollectionContext) else ()


def _record_sizes(awaitables: list[Awaitable[KeyedJaggedTensor]], ctx: Any) -> KJTListAwaitable:
    for context, awaitable in zip(_contexts(ctx), awaitables):
        if isinstance(context, EmbeddingShardingContext):
            context.sizes_known(awaitable)
    return KJTListAwaitable(awaitables, ctx)


class FusedKJTListSplitsAwaitable(Awaitable[list[KJTListAwaitable]]):
    """Awaitable of the sizes of several modules' features, in one exchange.

    Args:
        requests: the result of each module's input_dist; members of class :class:`KJTSplitsAllToAllMeta` share the
            exchange, and other members are awaited.
        contexts: contexts of the modules.
        pg: the ranks; None for one process.
    """

    def __init__(
        self,
        requests: list[KJTListSplitsAwaitable[C]],
        contexts: list[C],
        pg: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._contexts = contexts
        self._members: list[list[Any]] = [list(request.awaitables) for request in requests]
        metas = [m for members in self._members for m in members if isinstance(m, KJTSplitsAllToAllMeta)]
        tensors = [tensor for meta in metas for tensor in meta.splits_tensors]
        group = pg if pg is not None else metas[0].pg if metas else None
        self._exchange = SplitsAllToAllAwaitable(tensors, group) if group is not None and tensors else None

    def _wait_impl(self) -> list[KJTListAwaitable]:
        sizes = iter(self._exchange.wait() if self._exchange is not None else ())
        return [
            _record_sizes([_begin(member, sizes) for member in members], ctx)
            for members, ctx in zip(self._members, self._contexts)
        ]


def _begin(member: Any, sizes: Any) -> Awaitable[KeyedJaggedTensor]:
    """Start the exchange of the tensors, with the exchanged sizes."""
    if not isinstance(member, KJTSplitsAllToAllMeta):
        started: Awaitable[KeyedJaggedTensor] = member.wait()
        return started
    forms, batch_sizes, *output_splits = (next(sizes) for _ in member.splits_tensors)
    check_forms(form_of(member.labels, member.input_tensors), forms, member.pg)
    return KJTAllToAllTensorsAwaitable(
        pg=member.pg,
        input=member._input,
        splits=member.splits,
        input_splits=member.input_splits,
        output_splits=output_splits[: len(member.labels)],
        input_tensors=member.input_tensors,
        labels=member.labels,
        keys=member.keys,
        device=member.device,
        stagger=member.stagger,
        stride_per_rank=None if member._input.variable_stride_per_key() else batch_sizes,
    )


class ListOfKJTListAwaitable(Awaitable[ListOfKJTList]):
    """Awaitable of the features of several shardings, each for several devices.

    Args:
        awaitables: one per sharding.
    """

    def __init__(self, awaitables: list[Awaitable[KJTList]]) -> None:
        super().__init__()
        self.awaitables = awaitables

    def _wait_impl(self) -> ListOfKJTList:
        return ListOfKJTList([awaitable.wait() for awaitable in self.awaitables])


class ListOfKJTListSplitsAwaitable(Awaitable[Awaitable[ListOfKJTList]]):
    """Awaitable of the sizes of several shardings' features, each for several devices.

    Args:
        awaitables: one per sharding.
    """

    def __init__(self, awaitables: list[Awaitable[Awaitable[KJTList]]]) -> None:
        super().__init__()
        self.awaitables = awaitables

    def _wait_impl(self) -> ListOfKJTListAwaitable:
        return ListOfKJTListAwaitable([awaitable.wait() for awaitable in self.awaitables])
