"""DenseTableGroup: tables that one kernel call looks up on CPU, with gradients as tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recinfer.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from recinfer.distributed.tables.cpu import TableGroup
from recinfer.distributed.tables.replicas import LookupGradient

__all__ = ["DenseTableGroup"]


class DenseTableGroup(TableGroup):
    """Tables with gradients as tensors: each table is a parameter for any optimizer.

    The parameters are views of the flat tensor, so one kernel call looks up all of them.
    """

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        super()._build(dtype, device)
        self._states = {}
        self.tables = nn.ParameterList()
        for s, start in zip(self.shapes, self._starts):
            table = TableBatchedEmbeddingSlice(self.weights, start, start + s.rows * s.dim, s.rows, s.dim)
            self.tables.append(table.requires_grad_())

    def _leaves(self) -> Iterable[Tensor]:
        return self.tables

    def _leaf_gradients(self, call: LookupGradient) -> list[Tensor]:
        return self.table_gradients(call)

    @torch.no_grad()
    def table_gradients(self, call: LookupGradient) -> list[Tensor]:
        """The gradient ``[rows, dim]`` of every table."""
        flat = torch.zeros_like(self.weights)
        for block, rows, grad in self._row_gradients(call):
            block.matrix(flat).index_copy_(0, rows, grad.to(flat.dtype))
        return [flat[start : start + s.rows * s.dim].view(s.rows, s.dim) for s, start in zip(self.shapes, self._starts)]
