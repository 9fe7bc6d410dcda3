"""RankLookup: the lookups of a rank, one kernel call for each group of its tables, float and packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from recinfer.distributed.types.tables import GroupedEmbeddingConfig
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["RankLookup", "embeddings_cat_empty_rank_handle"]

K = TypeVar("K", bound=Callable[[KeyedJaggedTensor], Tensor])


def embeddings_cat_empty_rank_handle(embeddings: list[Tensor], dummy_embs_tensor: Tensor, dim: int = 0) -> Tensor:
    """Concatenate the groups' vectors along ``dim``; ``dummy_embs_tensor`` on a rank without tables."""
    if not embeddings:
        return dummy_embs_tensor
    return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=dim)


class RankLookup(Generic[K]):
    """The kernel calls of a rank.

    Args:
        groups: the groups of its rectangles; features come in their order.
        kernels: of each group: :class:`~recinfer.distributed.tables.group_kernel.GroupKernel` for float tables,
            :class:`~recinfer.distributed.quant.runtime.GroupLookup` for packed ones. Called with the group's features,
            they return ``[B, columns of its features]``, or ``[ids, columns]`` unpooled.
    """

    def __init__(self, groups: Sequence[GroupedEmbeddingConfig], kernels: Iterable[K]) -> None:
        self.kernels = list(kernels)
        self._splits = [group.num_features() for group in groups]

    def calls(self, features: KeyedJaggedTensor) -> list[tuple[K, KeyedJaggedTensor]]:
        """Each kernel with the features of its group."""
        parts = [features] if len(self._splits) < 2 else features.split(self._splits)
        return list(zip(self.kernels, parts))

    def __call__(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Each group's vectors."""
        return [kernel(part) for kernel, part in self.calls(features)]
