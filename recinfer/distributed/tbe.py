"""The one seam to FBGEMM's training table-batched embeddings (TBE): look tables up, update the touched rows.

No other file imports FBGEMM's training classes or calls its training operators. On CPU the operators are called on one
flat tensor of rows that we own, forward and backward apart: the backward of a lookup is a plain method
(:meth:`TableGroup.update`), so a caller may also run it with ids and gradients that other ranks sent.

Shapes: ``T`` features, ``B`` bags a feature, ``N`` ids, ``D`` columns of all features together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.distributed.embedding_types import OptimType
from recinfer.distributed.fused_params import BoundsCheckMode, FusedSettings
from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType

try:
    import fbgemm_gpu  # noqa: F401  registers the ops
except ImportError as error:
    raise UnavailableError(
        "FBGEMM is not installed; install recinfer with its extra 'cpu' (or 'cuda' on a GPU machine): "
        f"pip install 'recinfer[cpu]' ({error})"
    ) from error

__all__ = ["DenseTableGroup", "TableGroup", "TableShape", "padded_offsets"]

_POOLING = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
_OUTPUT = {torch.float32: 0, torch.float16: 1}
_WEIGHTS = (torch.float32, torch.float16)


@dataclass(frozen=True)
class TableShape:
    """One table (or the piece of it that lies here).

    Attributes:
        name: for messages and state keys.
        rows, dim: its size.
        num_features: features that look it up; they stand next to each other in the input.
    """

    name: str
    rows: int
    dim: int
    num_features: int = 1


class TableGroup(nn.Module):
    """Tables that one call looks up, on CPU; their rows in one flat tensor.

    Args:
        shapes: the tables; those with no rows or no feature are left out by the caller.
        pooling: SUM, MEAN or NONE (one vector an id; all tables of one dim).
        settings: the update that :meth:`update` runs, bounds check and output type.
        dtype: of the rows, float32 or float16.

    Raises:
        ConfigError: dtypes the kernels do not have, or unpooled tables of different dims.
    """

    weights: Tensor

    def __init__(
        self,
        shapes: Sequence[TableShape],
        pooling: PoolingType,
        settings: FusedSettings,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if dtype not in _WEIGHTS or settings.output_dtype not in _OUTPUT:
            raise ConfigError(
                f"tables of {dtype} with outputs of {settings.output_dtype}; the CPU kernels have float32 and float16"
            )
        if pooling is PoolingType.NONE and len({s.dim for s in shapes}) > 1:
            raise ConfigError(f"unpooled tables of one group must have one dim; got {sorted({s.dim for s in shapes})}")
        self.shapes = tuple(shapes)
        self.pooling = pooling
        self.settings = settings
        self.learning_rate = settings.learning_rate
        starts = [0, *accumulate(s.rows * s.dim for s in shapes)]
        row_starts = [0, *accumulate(s.rows for s in shapes)]
        of_feature = [t for t, s in enumerate(shapes) for _ in range(s.num_features)]
        dims = [shapes[t].dim for t in of_feature]
        self.feature_dims = dims
        self.feature_tables = of_feature
        self.total_dim = sum(dims)
        self.register_buffer("weights", torch.empty(starts[-1], dtype=dtype, device=device), persistent=False)
        self._starts, self._row_starts = starts, row_starts

        def tensor(data: list[int], kind: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(data, dtype=kind)

        self._placements = torch.zeros(len(dims), dtype=torch.int32)
        self._weights_offsets = tensor([starts[t] for t in of_feature])
        self._row_offsets = tensor([row_starts[t] for t in of_feature])
        self._hash_sizes = tensor([*(row_starts[t] for t in of_feature), row_starts[-1]])
        self._hash_bits = int(math.log2(max(row_starts[-1], 1)) + 1)
        self._dim_offsets = tensor([0, *accumulate(dims)], torch.int32)
        self._rows_per_feature = tensor([shapes[t].rows for t in of_feature])
        self._warnings = torch.zeros(1, dtype=torch.int64)
        rows = row_starts[-1]
        self.states: dict[str, Tensor] = {}
        if settings.optimizer is OptimType.ROWWISE_ADAGRAD:
            self.states["momentum1"] = torch.zeros(rows)
        elif settings.optimizer is OptimType.ADAGRAD:
            self.states["momentum1"] = torch.zeros(starts[-1])

    # ------------------------------------------------------------------------------------------------- tables

    def table_weights(self) -> list[Tensor]:
        """A ``[rows, dim]`` view on the rows of each table."""
        return [
            self.weights[start : start + s.rows * s.dim].view(s.rows, s.dim)
            for s, start in zip(self.shapes, self._starts)
        ]

    # ------------------------------------------------------------------------------------------------- the kernel

    def check_bounds(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> None:
        """Apply ``settings.bounds_check_mode`` to ``indices`` in place.

        Raises:
            InputError: an id outside its table in mode FATAL.
        """
        mode = self.settings.bounds_check_mode
        if mode is BoundsCheckMode.NONE or indices.numel() == 0:
            return
        try:
            torch.ops.fbgemm.bounds_check_indices(
                self._rows_per_feature, indices, offsets, mode.value, self._warnings, per_sample_weights
            )
        except RuntimeError as error:
            raise InputError(
                f"ids outside their table in a lookup of {[s.name for s in self.shapes]}: {error}"
            ) from error

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """The vectors of ``indices``; :meth:`update` runs in the backward.

        Args:
            indices: ``[N]``, int32 or int64, feature by feature.
            offsets: ``[T * B + 1]`` bounds of the bags.
            per_sample_weights: float32 ``[N]``.
            batch_sizes: bags of each feature from each rank, when features have different numbers of bags.

        Returns:
            ``[B, D]``; ``[N, dim]`` unpooled; with ``batch_sizes`` one dimension: rank by rank, and in it feature by
            feature, the bags' vectors.
        """
        offsets = offsets.to(indices.dtype)
        if batch_sizes is not None:
            offsets = padded_offsets(offsets, [sum(sizes) for sizes in batch_sizes])
        self.check_bounds(indices, offsets, per_sample_weights)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.float()
        out = self._differentiable_lookup(indices, offsets, per_sample_weights)
        if batch_sizes is not None and self.pooling is not PoolingType.NONE:
            out = _RankMajor.apply(out, batch_sizes, self.feature_dims)
        return out

    def _differentiable_lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        anchor = torch.empty(0, requires_grad=True)  # no table is a leaf; this makes autograd run the backward
        out: Tensor = _FusedLookup.apply(anchor, per_sample_weights, self, indices, offsets)
        return out

    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """As :meth:`forward`, without bounds check and without gradients."""
        if self.pooling is PoolingType.NONE:
            out = torch.ops.fbgemm.split_embedding_nobag_codegen_forward_cpu(
                self.weights,
                self._weights_offsets,
                self.shapes[0].dim,
                self._hash_sizes,
                indices,
                offsets,
                _OUTPUT[self.settings.output_dtype],
            )
        else:
            out = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
                self.weights,
                self._weights_offsets,
                self._dim_offsets,
                self.total_dim,
                self._hash_sizes,
                indices,
                offsets,
                _POOLING[self.pooling],
                per_sample_weights,  # None becomes an undefined tensor; an empty one would be read
                _OUTPUT[self.settings.output_dtype],
            )
        result: Tensor = out
        return result

    def per_sample_weight_gradient(self, grad_output: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """The gradient ``[N]`` of ``per_sample_weights``."""
        out: Tensor = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            grad_output,
            self.weights,
            self._weights_offsets,
            self._dim_offsets,
            indices,
            offsets,
            None,
        )
        return out

    @torch.no_grad()
    def update(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, grad_output: Tensor) -> None:
        """One optimizer step on the rows of ``indices``, with ``grad_output`` the gradient of :meth:`forward`'s output."""
        if self.settings.gradient_clipping:
            grad_output = grad_output.clamp(-self.settings.max_gradient, self.settings.max_gradient)
        if indices.numel():
            self._run(indices, offsets, per_sample_weights, grad_output.contiguous())

    def _run(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, grad_output: Tensor) -> None:
        settings, unpooled = self.settings, self.pooling is PoolingType.NONE
        ops, name = torch.ops.fbgemm, _OPS[settings.optimizer]
        tables = (self.weights, self._placements, self._weights_offsets)
        ids = (self._hash_sizes, self._hash_bits, indices, offsets)
        rate = torch.tensor(self.learning_rate, dtype=torch.float32)
        state: tuple[Any, ...] = ()
        if settings.optimizer is OptimType.ROWWISE_ADAGRAD:
            decay = (settings.weight_decay, settings.weight_decay_mode.value, settings.max_norm)
            state = (self.states["momentum1"], self._placements, self._row_offsets, rate, settings.eps, *decay)
        elif settings.optimizer is OptimType.ADAGRAD:
            state = (self.states["momentum1"], self._placements, self._weights_offsets, rate, settings.eps)
        else:
            state = (rate,)
        rounding = settings.stochastic_rounding
        if unpooled:
            op = getattr(ops, f"split_embedding_nobag_backward_codegen_{name}_cpu")
            op(grad_output, *tables, self.shapes[0].dim, *ids, rounding, *state)
            return
        op = getattr(ops, f"split_embedding_backward_codegen_{name}_cpu")
        max_dim = max(self.feature_dims)
        op(
            grad_output,
            *tables,
            self._dim_offsets,
            max_dim,
            *ids,
            _POOLING[self.pooling],
            per_sample_weights,
            rounding,
            *state,
        )


_OPS = {OptimType.SGD: "sgd", OptimType.ADAGRAD: "adagrad", OptimType.ROWWISE_ADAGRAD: "rowwise_adagrad"}


class _FusedLookup(torch.autograd.Function):
    """Look up; in the backward update the rows and give the gradient of the per-sample weights."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, weights: Tensor | None, group: TableGroup, indices: Tensor, offsets: Tensor
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(indices, offsets, weights)
        return group.lookup(indices, offsets, weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        indices, offsets, weights = ctx.saved_tensors
        grad_weights = None
        if weights is not None and ctx.needs_input_grad[1]:
            grad_weights = ctx.group.per_sample_weight_gradient(grad_output.contiguous(), indices, offsets)
        ctx.group.update(indices, offsets, weights, grad_output)
        return None, grad_weights, None, None, None


def padded_offsets(offsets: Tensor, batch_sizes: Sequence[int]) -> Tensor:
    """Bounds of bags of ``T`` features with ``batch_sizes`` bags each -> of ``T * max(batch_sizes)``, the new ones empty."""
    most = max(batch_sizes, default=0)
    starts = torch.tensor([0, *accumulate(batch_sizes)][:-1]).unsqueeze(1)
    within = torch.arange(most).unsqueeze(0).minimum(torch.tensor(list(batch_sizes)).unsqueeze(1))
    return torch.cat([offsets[(starts + within).reshape(-1)], offsets[-1:]])


class _RankMajor(torch.autograd.Function):
    """``[most bags, D]`` -> one dimension: rank by rank, feature by feature, only the bags that there are."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, batch_sizes: Sequence[Sequence[int]], dims: Sequence[int]) -> Tensor:
        ctx.shape, ctx.pieces = out.shape, _pieces(batch_sizes, dims)
        parts = [out[rows, columns].reshape(-1) for rows, columns in ctx.pieces]
        return torch.cat(parts) if parts else out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        full, at = grad.new_zeros(ctx.shape), 0
        for rows, columns in ctx.pieces:
            target = full[rows, columns]
            target.copy_(grad[at : at + target.numel()].view(target.shape))
            at += target.numel()
        return full, None, None


def _pieces(batch_sizes: Sequence[Sequence[int]], dims: Sequence[int]) -> list[tuple[slice, slice]]:
    columns = [0, *accumulate(dims)]
    rows = [[0, *accumulate(sizes)] for sizes in batch_sizes]
    ranks = range(len(batch_sizes[0]) if batch_sizes else 0)
    return [
        (slice(rows[f][r], rows[f][r + 1]), slice(columns[f], columns[f + 1])) for r in ranks for f in range(len(dims))
    ]


class DenseTableGroup(TableGroup):
    """Tables whose gradients come out as tensors: each table is a parameter, any optimizer may step it.

    The parameters are views on the flat tensor, so one kernel call still looks all of them up.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        pooling: PoolingType,
        settings: FusedSettings,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(shapes, pooling, settings, dtype, device)
        self.states.clear()
        self.tables = nn.ParameterList([nn.Parameter(view) for view in self.table_weights()])

    def _differentiable_lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        out: Tensor = _DenseLookup.apply(self, indices, offsets, per_sample_weights, *self.tables)
        return out

    @torch.no_grad()
    def table_gradients(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, grad_output: Tensor
    ) -> list[Tensor]:
        """The gradient ``[rows, dim]`` of every table."""
        grad_output = grad_output.contiguous()
        if self.pooling is PoolingType.NONE:
            flat = torch.zeros_like(self.weights)
            dim = self.shapes[0].dim
            num_bags = (offsets.numel() - 1) // len(self.feature_dims)
            starts = offsets[::num_bags] if num_bags else offsets.new_zeros(len(self.feature_dims) + 1)
            rows = indices + torch.repeat_interleave(self._row_offsets.to(indices.dtype), starts.diff())
            flat.view(-1, dim).index_add_(0, rows, grad_output.to(flat.dtype))
        else:
            flat = torch.ops.fbgemm.split_embedding_backward_codegen_dense_cpu(
                grad_output,
                self.weights,
                self._weights_offsets,
                self._dim_offsets,
                max(self.feature_dims),
                self._hash_sizes,
                self._hash_bits,
                indices,
                offsets,
                _POOLING[self.pooling],
                per_sample_weights,
            )
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
        gradients = ctx.group.table_gradients(indices, offsets, weights, grad_output)
        return None, None, None, grad_weights, *gradients
