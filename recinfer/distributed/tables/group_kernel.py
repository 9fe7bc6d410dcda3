"""GroupKernel: tables that one kernel call looks up, as named parameters with state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recinfer.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from recinfer.distributed.fused_params import FusedSettings, names_optimizer
from recinfer.distributed.tables.cpu import TableShape
from recinfer.distributed.tables.cpu_dense import DenseTableGroup
from recinfer.distributed.tables.cuda import make_table_group
from recinfer.distributed.tables.optimizer import TablePiece, UnnamedOptimizer
from recinfer.distributed.types.kernels import EmbeddingComputeKernel, compute_kernel_to_embedding_location
from recinfer.distributed.types.tables import GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.modules.embedding_configs import PoolingType, data_type_to_dtype
from recinfer.optim.fused import mark_fused
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["CommOpGradientScaling", "GroupKernel"]


class CommOpGradientScaling(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by a factor.

    Collectives divide their gradients by the world size; gradients of per-sample weights must not be divided twice.
    """

    @staticmethod
    def forward(ctx: Any, input_tensor: Tensor, scale_gradient_factor: int) -> Tensor:
        """``input_tensor`` itself; the factor is for the backward."""
        ctx.scale_gradient_factor = scale_gradient_factor
        return input_tensor.view_as(input_tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``grad_output`` times the factor."""
        return grad_output * ctx.scale_gradient_factor, None


class GroupKernel(nn.Module):
    """A grouped config and the tables that its kernel looks up."""

    def __init__(self, config: GroupedEmbeddingConfig, pooling: PoolingType, device: torch.device | None) -> None:
        super().__init__()
        self.config = config
        self.is_fused = config.compute_kernel is not EmbeddingComputeKernel.DENSE
        tables, params = config.embedding_tables, _fused_params(config)
        self.group = make_table_group(
            [TableShape(t.name, t.local_rows, t.local_cols, t.num_features()) for t in tables],
            pooling,
            FusedSettings.from_params(params) if self.is_fused else None,
            data_type_to_dtype(config.data_type),
            device,
            compute_kernel_to_embedding_location(config.compute_kernel),
        )
        for table, rows in zip(tables, self.group.table_weights()):
            _fill(table, rows)
        states: list[dict[str, Tensor]] = [{} for _ in tables]
        if isinstance(self.group, DenseTableGroup):
            parameters = list(self.group.tables)
        else:
            views = self.group.table_weights()
            parameters = [TableBatchedEmbeddingSlice(w.detach().view(-1), 0, w.numel(), *w.shape) for w in views]
            states = self.group.table_states()
            for parameter in parameters:
                parameter.requires_grad_()
                mark_fused(parameter)
        # A list of dataclasses, so that the parameters are not registered here under other names.
        self.pieces = [TablePiece(t, p, s) for t, p, s in zip(tables, parameters, states)]
        unnamed = self.is_fused and not names_optimizer(params)
        self._unnamed = UnnamedOptimizer(self.group, [t.name for t in tables]) if unnamed else None

    def forward(self, features: KeyedJaggedTensor, weight_gradient_factor: int = 1) -> Tensor:
        weights = features.weights_or_none() if self.config.is_weighted else None
        if weights is not None and weights.requires_grad and weight_gradient_factor != 1:
            weights = CommOpGradientScaling.apply(weights, weight_gradient_factor)
        out: Tensor = self.group(features.values(), features.offsets(), weights, _batch_sizes(features))
        return out if self._unnamed is None else self._unnamed(out)

    def prefetch(self, features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Load the rows of ``features`` into the caches."""
        self.group.prefetch(features.values(), features.offsets(), forward_stream, _batch_sizes(features))


def _batch_sizes(features: KeyedJaggedTensor) -> list[list[int]] | None:
    """Bags of each feature from each rank, if they differ."""
    return features.stride_per_key_per_rank() if features.variable_stride_per_key() else None


@torch.no_grad()
def _fill(table: ShardedEmbeddingTable, rows: Tensor) -> None:
    if rows.is_meta:
        return
    if table.init_fn is not None:
        table.init_fn(rows)
    else:
        rows.uniform_(table.get_weight_init_min(), table.get_weight_init_max())


def _fused_params(config: GroupedEmbeddingConfig) -> dict[str, Any]:
    params = dict(config.fused_params or {})
    if not params and config.embedding_tables:
        params = dict(config.embedding_tables[0].fused_params or {})
    return params
