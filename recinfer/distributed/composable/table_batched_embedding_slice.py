"""TableBatchedEmbeddingSlice: the parameter of one table in a flat tensor of several tables."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TableBatchedEmbeddingSlice"]


class TableBatchedEmbeddingSlice(nn.Parameter):
    """A ``[num_embeddings, embedding_dim]`` view of a flat tensor, as a leaf parameter that shares its memory.

    ``isinstance(p, TableBatchedEmbeddingSlice)`` distinguishes tables of sharded modules from other parameters. Tables
    of a fused kernel never have a gradient.

    Args:
        data: the flat tensor, one dimension; ``requires_grad`` is taken from it.
        start_offset, end_offset: the slice, in elements.
        num_embeddings, embedding_dim: the shape; their product is the slice's size.

    Attributes:
        grad: the slice of ``data.grad`` where there is one, else the gradient of this parameter itself. Assigning None
            drops both; assigning a tensor writes into ``data.grad`` where there is one.
    """

    _flat: Tensor
    _span: tuple[int, int]

    def __new__(
        cls, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> TableBatchedEmbeddingSlice:
        rows = data.detach()[start_offset:end_offset].view(num_embeddings, embedding_dim)
        made: TableBatchedEmbeddingSlice = torch.Tensor._make_subclass(cls, rows, data.requires_grad)
        made._flat, made._span = data, (start_offset, end_offset)
        return made

    def __init__(
        self, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> None:
        pass  # __new__ has built the object

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Gradient of the slice; see the class."""
        if self._flat.grad is None:
            own: Tensor | None = _OWN_GRAD.__get__(self)
            return own
        return self._flat.grad[slice(*self._span)].view(self.shape)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._flat.grad = None
        elif self._flat.grad is not None:
            self._flat.grad[slice(*self._span)].copy_(value.reshape(-1))
            return
        _OWN_GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableBatchedEmbeddingSlice:
        """A slice of the copy of the flat tensor, so that slices of one tensor stay slices of one."""
        if id(self) in memo:
            found: TableBatchedEmbeddingSlice = memo[id(self)]
            return found
        if self.untyped_storage()._cdata == self._flat.untyped_storage()._cdata:
            copied = TableBatchedEmbeddingSlice(copy.deepcopy(self._flat, memo), *self._span, *self.shape)
        else:  # a slice that was moved (``data`` assigned, Module.to) has its own memory
            copied = TableBatchedEmbeddingSlice(copy.deepcopy(self.data, memo).view(-1), 0, self.numel(), *self.shape)
        memo[id(self)] = copied
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in _OWN})
        copied.requires_grad_(self.requires_grad)
        return copied


_OWN = ("_flat", "_span")
_OWN_GRAD: Any = torch.Tensor.grad  # the descriptor that the property above hides
