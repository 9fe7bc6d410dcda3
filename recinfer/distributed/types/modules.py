"""Interface of sharded modules, with separate steps for pipelines: input exchange, computation, output exchange."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import nn

from recinfer.distributed.types.awaitables import Awaitable, LazyAwaitable
from recinfer.distributed.types.codecs import QuantizedCommCodecs
from recinfer.sparse.opaque import Opaque
from recinfer.streamable import Multistreamable

__all__ = [
    "NullShardedModuleContext",
    "NullShardingContext",
    "ShardedModule",
]


CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")


class NullShardingContext(Multistreamable):
    """The context of a sharding that needs none."""

    def record_stream(self, stream: Any) -> None:
        """Does nothing: there are no tensors."""


class NullShardedModuleContext(Multistreamable):
    """The context of a sharded module that needs none."""

    def record_stream(self, stream: Any) -> None:
        """Does nothing: there are no tensors."""


class ShardedModule(Opaque, abc.ABC, nn.Module, Generic[CompIn, DistOut, Out, ShrdCtx]):
    """A module whose forward is an input exchange, a computation and an output exchange."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__()
        self._qcomm_codecs_registry = qcomm_codecs_registry or {}

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs]:
        """``CommOp`` name -> codecs."""
        return self._qcomm_codecs_registry

    @abc.abstractmethod
    def create_context(self) -> ShrdCtx:
        """A new context for one forward."""

    @abc.abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Start the input exchange."""

    @abc.abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """Compute on the local shards."""

    @abc.abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> LazyAwaitable[Out]:
        """Start the output exchange."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> LazyAwaitable[Out]:
        """Run both steps; subclasses override this if the steps overlap."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Run all steps."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input)

    def prefetch(self, dist_input: CompIn, forward_stream: Any = None, ctx: ShrdCtx | None = None) -> None:
        """Load the rows of a coming batch into the cache, if there is one."""

    def drop_prefetched(self) -> None:
        """Drop prefetched batches that will not be looked up; their rows may stay in the cache."""

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters that are sharded, not replicated."""
        for name, _ in self.named_parameters(prefix):
            yield name

    def preprocess_input(self, args: list[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
        """Hook that a pipeline runs before input_dist."""
        return args, kwargs
