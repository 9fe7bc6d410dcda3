"""Awaitables of the features of several shardings, in one exchange or one each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from recinfer.distributed.exchange.kjt import KJTSplitsAllToAllMeta, SplitsAllToAllAwaitable, check_forms, form_of
from recinfer.distributed.exchange.tensors import KJTAllToAllTensorsAwaitable
from recinfer.distributed.types import Awaitable
from recinfer.distributed.types.kjt_lists import KJTList, ListOfKJTList
from recinfer.distributed.types.shardings import EmbeddingShardingContext, ShardedCollectionContext
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.streamable import Multistreamable

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "FusedKJTListSplitsAwaitable",
    "KJTListAwaitable",
    "KJTListSplitsAwaitable",
    "ListOfKJTListAwaitable",
    "ListOfKJTListSplitsAwaitable",
]

C = TypeVar("C", bound=Multistreamable)


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
