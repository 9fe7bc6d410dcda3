"""Tables that one kernel call looks up and whose gradients come out as tensors, on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recinfer.distributed.replicas import LookupGradient
from recinfer.distributed.table_group import TableGroup

__all__ = ["DenseTableGroup"]


class DenseTableGroup(TableGroup):
    """Tables whose gradients come out as tensors: each table is a parameter, any optimizer may step it.

    The parameters are views on the flat tensor, so one kernel call still looks all of them up.
    """

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        super()._build(dtype, device)
        self._states = {}
        self.tables = nn.ParameterList([nn.Parameter(view) for view in self.table_weights()])

    def _differentiable(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        out: Tensor = _DenseLookup.apply(self, indices, offsets, per_sample_weights, *self.tables)
        return out

    @torch.no_grad()
    def table_gradients(self, call: LookupGradient) -> list[Tensor]:
        """The gradient ``[rows, dim]`` of every table."""
        flat = torch.zeros_like(self.weights)
        for block, rows, grad in self._row_gradients(call):
            block.matrix(flat).index_copy_(0, rows, grad.to(flat.dtype))
        return [flat[start : start + s.rows * s.dim].view(s.rows, s.dim) for s, start in zip(self.shapes, self._starts)]


class _DenseLookup(torch.autograd.Function):
    """Look up; the backward gives each table its whole gradient."""

    @staticmethod
    def forward(
        ctx: Any, group: DenseTableGroup, indices: Tensor, offsets: Tensor, weights: Tensor | None, *tables: Tensor
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(indices, offsets, weights)
        return group.lookup(indices, offsets, weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        indices, offsets, weights = ctx.saved_tensors
        grad_weights = None
        if weights is not None and ctx.needs_input_grad[3]:
            grad_weights = ctx.group.per_sample_weight_gradient(grad_output.contiguous(), indices, offsets)
        gradients = ctx.group.table_gradients(LookupGradient(indices, offsets, weights, grad_output.contiguous()))
        return None, None, None, grad_weights, *gradients
