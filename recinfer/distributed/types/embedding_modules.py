"""Interfaces of lookups and of sharded embedding modules."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from torch import nn

from recinfer.distributed.types.codecs import QuantizedCommCodecs
from recinfer.distributed.types.modules import ShardedModule

if TYPE_CHECKING:
    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseEmbeddingLookup",
    "BaseGroupedFeatureProcessor",
    "FeatureShardingMixIn",
    "ModuleShardingMixIn",
    "ShardedEmbeddingModule",
]

F = TypeVar("F")
T = TypeVar("T")
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")


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
