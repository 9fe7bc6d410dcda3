"""Tables that one kernel call looks up on CPU, and the optimizer that updates the touched rows in the backward.

FBGEMM's training operators are called on one flat tensor of rows that we own, forward and backward apart: the backward
of a lookup is a plain method (:meth:`TableGroup.update`), so a caller may also run it with ids and gradients that other
ranks sent. What FBGEMM has no CPU kernel for runs by :mod:`recinfer.optim.row_updates`. CUDA:
:mod:`recinfer.distributed.tbe`.

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
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.replicas import LookupGradient, Replicas
from recinfer.distributed.types import BoundsCheckMode
from recinfer.distributed.variable_batch import padded_offsets, rank_major
from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.optim.row_updates import UPDATES

try:
    import fbgemm_gpu  # noqa: F401  registers the ops
except ImportError as error:
    raise UnavailableError(
        "FBGEMM is not installed; install recinfer with its extra 'cpu' (or 'cuda' on a GPU machine): "
        f"pip install 'recinfer[cpu]' ({error})"
    ) from error

__all__ = ["DenseTableGroup", "TableGroup", "TableShape"]

_POOLING = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
_OUTPUT = {torch.float32: 0, torch.float16: 1}
_WEIGHTS = (torch.float32, torch.float16)
_OUTSIDE = "out of bounds"  # in the operators' message
_OPS = {OptimType.SGD: "sgd", OptimType.ADAGRAD: "adagrad", OptimType.ROWWISE_ADAGRAD: "rowwise_adagrad"}


@dataclass(frozen=True)
class TableShape:
    """One table (or the piece of it that lies here).

    Attributes:
        name: for messages and state keys.
        rows, dim: its size; a piece may have no rows.
        num_features: features that look it up; they stand next to each other in the input.
    """

    name: str
    rows: int
    dim: int
    num_features: int = 1


class TableGroup(nn.Module):
    """Tables that one call looks up, on CPU, and the optimizer that updates their rows in the backward.

    Args:
        shapes: the tables.
        pooling: SUM, MEAN or NONE (one vector an id; all tables of one dim).
        settings: the update, bounds check and output type.
        dtype: of the rows, float32 or float16.
        device: ``cpu`` or ``meta``.

    Raises:
        ConfigError: dtypes the kernels do not have, or unpooled tables of different dims.

    Attributes:
        param_group: ``{"lr": rate}``; every update reads it.
        replicas: the ranks that hold the same tables; updates then apply all ranks' gradients, averaged.
        steps: int64 ``[1]``, the updates so far, if the optimizer's formula counts them, else None.
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
        if pooling is PoolingType.NONE and len({s.dim for s in shapes}) > 1:
            raise ConfigError(f"unpooled tables of one group must have one dim; got {sorted({s.dim for s in shapes})}")
        self.shapes = tuple(shapes)
        self.pooling = pooling
        self.settings = settings
        self.param_group: dict[str, Any] = {"lr": settings.learning_rate}
        self.replicas: Replicas | None = None
        self.feature_dims = [s.dim for s in shapes for _ in range(s.num_features)]
        self._anchor = torch.empty(0, requires_grad=True)  # no table is a leaf; this makes autograd run the backward
        self._build(dtype, device)

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        """Rows, state, and the operators' arguments that never change."""
        if dtype not in _WEIGHTS or self.settings.output_dtype not in _OUTPUT:
            raise ConfigError(
                f"tables of {dtype} with outputs of {self.settings.output_dtype}; the CPU kernels have float32, float16"
            )
        shapes = self.shapes
        # The kernels tell tables apart by their first row, so a table without rows gets one that nobody sees.
        physical = [max(s.rows, 1) for s in shapes]
        self._starts = [0, *accumulate(rows * s.dim for rows, s in zip(physical, shapes))]
        self._row_starts = [0, *accumulate(physical)]
        self.register_buffer("weights", torch.zeros(self._starts[-1], dtype=dtype, device=device), persistent=False)
        update = UPDATES[self.settings.optimizer.value]
        self._states = {
            name: torch.zeros(self._row_starts[-1] if rowwise else self._starts[-1], device=device)
            for name, rowwise in update.states.items()
        }
        self.steps = torch.zeros(1, dtype=torch.int64) if update.counts_steps else None
        of_feature = [t for t, s in enumerate(shapes) for _ in range(s.num_features)]

        def tensor(data: list[int], kind: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(data, dtype=kind)

        self._table_of_feature = tensor(of_feature)
        self._placements = torch.zeros(len(of_feature), dtype=torch.int32)
        self._weights_offsets = tensor([self._starts[t] for t in of_feature])
        self._row_offsets = tensor([self._row_starts[t] for t in of_feature])
        self._hash_sizes = tensor([*(self._row_starts[t] for t in of_feature), self._row_starts[-1]])
        self._dim_offsets = tensor([0, *accumulate(self.feature_dims)], torch.int32)
        self._rows_per_feature = tensor([shapes[t].rows for t in of_feature])
        self._warnings = torch.zeros(1, dtype=torch.int64)

    # ------------------------------------------------------------------------------------------------- tables

    def table_weights(self) -> list[Tensor]:
        """A ``[rows, dim]`` view on the rows of each table."""
        return [
            self.weights[start : start + s.rows * s.dim].view(s.rows, s.dim)
            for s, start in zip(self.shapes, self._starts)
        ]

    def table_states(self) -> list[dict[str, Tensor]]:
        """The optimizer's state of each table: views, ``[rows]`` where it is row-wise, else ``[rows, dim]``."""
        rowwise = UPDATES[self.settings.optimizer.value].states
        return [
            {
                name: state[row : row + s.rows]
                if rowwise[name]
                else state[start : start + s.rows * s.dim].view(s.rows, s.dim)
                for name, state in self._states.items()
            }
            for s, start, row in zip(self.shapes, self._starts, self._row_starts)
        ]

    def steps_loaded(self) -> None:
        """Called when a step count has been written into ``steps``."""

    # ------------------------------------------------------------------------------------------------- lookup

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
            ``[B, D]``; ``[N, dim]`` unpooled; with ``batch_sizes`` one dimension, see
            :func:`recinfer.distributed.variable_batch.rank_major`.

        Raises:
            InputError: an id outside its table, where the settings say so.
        """
        offsets = offsets.to(indices.dtype)
        if batch_sizes is not None:
            offsets = padded_offsets(offsets, batch_sizes)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.float()
        try:
            out = self._differentiable(indices, offsets, per_sample_weights)
        except RuntimeError as error:
            # The operators refuse ids outside their table by themselves, so good batches pay for no check.
            if _OUTSIDE not in str(error):
                raise
            indices = self._within_bounds(error, indices, offsets)
            out = self._differentiable(indices, offsets, per_sample_weights)
        if batch_sizes is not None and self.pooling is not PoolingType.NONE:
            out = rank_major(out, batch_sizes, self.feature_dims)
        return out

    def _differentiable(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """The lookup, tied to :meth:`update`."""
        out: Tensor = _FusedLookup.apply(self._anchor, per_sample_weights, self, indices, offsets)
        return out

    def _within_bounds(self, error: RuntimeError, indices: Tensor, offsets: Tensor) -> Tensor:
        """``indices`` with row 0 for those outside their table, where the settings say so."""
        mode = self.settings.bounds_check_mode
        if mode not in (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE):
            raise InputError(
                f"an id outside its table, in a lookup of {[(s.name, s.rows) for s in self.shapes]} (name, rows): "
                f"{str(error).splitlines()[0]}; give ids from 0, or bounds_check_mode=WARNING to read row 0 instead"
            ) from error
        indices = indices.clone()
        torch.ops.fbgemm.bounds_check_indices(self._rows_per_feature, indices, offsets, mode.value, self._warnings)
        return indices.clamp_(min=0)  # -1 means a pruned row to that operator: it lets it through

    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """As :meth:`forward`, without bounds check and without gradients; ``offsets`` of ``indices``' dtype."""
        ops, output = torch.ops.fbgemm, _OUTPUT[self.settings.output_dtype]
        tables = (self.weights, self._weights_offsets)
        out: Tensor
        if self.pooling is PoolingType.NONE:
            dim = self.shapes[0].dim
            out = ops.split_embedding_nobag_codegen_forward_cpu(
                *tables, dim, self._hash_sizes, indices, offsets, output
            )
            return out
        out = ops.split_embedding_codegen_forward_cpu(
            *tables,
            self._dim_offsets,
            sum(self.feature_dims),
            self._hash_sizes,
            indices,
            offsets,
            _POOLING[self.pooling],
            per_sample_weights,  # None becomes an undefined tensor; an empty one would be read
            output,
        )
        return out

    def per_sample_weight_gradient(self, grad_output: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """The gradient ``[N]`` of ``per_sample_weights``."""
        out: Tensor = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            grad_output, self.weights, self._weights_offsets, self._dim_offsets, indices, offsets, None
        )
        return out

    # ------------------------------------------------------------------------------------------------- update

    @torch.no_grad()
    def update(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, grad_output: Tensor) -> None:
        """One optimizer step on the rows of ``indices``, given the gradient of :meth:`lookup`'s output."""
        if self.settings.gradient_clipping:
            grad_output = grad_output.clamp(-self.settings.max_gradient, self.settings.max_gradient)
        call = LookupGradient(indices, offsets, per_sample_weights, grad_output.contiguous())
        if self.replicas is not None:
            call = self.replicas.gather(call, len(self.feature_dims), self.pooling is not PoolingType.NONE)
        if self.steps is not None:
            self.steps += 1
        if not call.indices.numel():
            return
        if self.settings.has_cpu_kernel:
            self._update_by_kernel(call)
        else:
            self._update_by_formula(call)

    def _update_by_kernel(self, call: LookupGradient) -> None:
        settings = self.settings
        name, rate = _OPS[settings.optimizer], torch.tensor(float(self.param_group["lr"]), dtype=torch.float32)
        state: tuple[Any, ...] = (rate,)
        if settings.optimizer is not OptimType.SGD:
            rowwise = settings.optimizer is OptimType.ROWWISE_ADAGRAD
            places = self._row_offsets if rowwise else self._weights_offsets
            state = (self._states["momentum1"], self._placements, places, rate, settings.eps)
        tables = (self.weights, self._placements, self._weights_offsets)
        hashing = (self._hash_sizes, self._hash_bits(self._hash_sizes))
        if self.pooling is PoolingType.NONE:
            op = getattr(torch.ops.fbgemm, f"split_embedding_nobag_backward_codegen_{name}_cpu")
            dims: tuple[Any, ...] = (self.shapes[0].dim,)
            bags: tuple[Any, ...] = ()
        else:
            op = getattr(torch.ops.fbgemm, f"split_embedding_backward_codegen_{name}_cpu")
            dims = (self._dim_offsets, max(self.feature_dims))
            bags = (_POOLING[self.pooling], call.per_sample_weights)
        ids = (call.indices, call.offsets)
        op(call.grad_output, *tables, *dims, *hashing, *ids, *bags, settings.stochastic_rounding, *state)

    @staticmethod
    def _hash_bits(hash_sizes: Tensor) -> int:
        return int(math.log2(max(int(hash_sizes[-1]), 1)) + 1)

    def _update_by_formula(self, call: LookupGradient) -> None:
        step = UPDATES[self.settings.optimizer.value].step
        hyper = self.settings.hyper(float(self.param_group["lr"]))
        count = int(self.steps) if self.steps is not None else 0
        states, weights = self.table_states(), self.table_weights()
        for table, (rows, grad) in enumerate(self.row_gradients(call)):
            if not rows.numel():
                continue
            touched = {name: state[rows] for name, state in states[table].items()}
            new = step(weights[table][rows].float(), grad, touched, hyper, count)
            weights[table][rows] = new.to(self.weights.dtype)
            for name, state in touched.items():
                states[table][name][rows] = state

    @torch.no_grad()
    def row_gradients(self, call: LookupGradient) -> list[tuple[Tensor, Tensor]]:
        """Each table's touched rows (int64 ``[R]``, ascending) and their gradients (float32 ``[R, dim]``)."""
        feature_of_id = self._feature_of_id(call.indices, call.offsets)
        unique, inverse = torch.unique(call.indices.long() + self._row_offsets[feature_of_id], return_inverse=True)
        bounds = torch.searchsorted(unique, torch.tensor(self._row_starts))
        within = inverse - bounds[self._table_of_feature[feature_of_id]]
        compact = [max(n, 1) for n in bounds.diff().tolist()]  # as in _build: no table without rows
        flat = self._flat_gradient(call._replace(indices=within, offsets=call.offsets.long()), compact)
        starts = [0, *accumulate(rows * s.dim for rows, s in zip(compact, self.shapes))]
        found = []
        for t, (first, last) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
            dim = self.shapes[t].dim
            grad = flat[starts[t] : starts[t] + (last - first) * dim].view(last - first, dim)
            found.append((unique[first:last] - self._row_starts[t], grad))
        return found

    def _feature_of_id(self, indices: Tensor, offsets: Tensor) -> Tensor:
        num_features = len(self.feature_dims)
        num_bags = (offsets.numel() - 1) // num_features
        counts = offsets[::num_bags].diff() if num_bags else offsets.new_zeros(num_features)
        return torch.repeat_interleave(torch.arange(num_features), counts.long(), output_size=indices.numel())

    def _flat_gradient(self, call: LookupGradient, table_rows: Sequence[int]) -> Tensor:
        """The dense gradient, float32, of tables with ``table_rows`` rows (at least 1 each), flat."""
        starts = [0, *accumulate(rows * s.dim for rows, s in zip(table_rows, self.shapes))]
        row_starts = torch.tensor([0, *accumulate(table_rows)])
        zeros, grad = torch.zeros(starts[-1]), call.grad_output.float()
        if self.pooling is PoolingType.NONE:
            features = self._feature_of_id(call.indices, call.offsets)
            rows = call.indices + row_starts[self._table_of_feature[features]].to(call.indices.dtype)
            zeros.view(-1, self.shapes[0].dim).index_add_(0, rows, grad)
            return zeros
        hash_sizes = torch.cat([row_starts[self._table_of_feature], row_starts[-1:]])
        out: Tensor = torch.ops.fbgemm.split_embedding_backward_codegen_dense_cpu(
            grad,
            zeros,
            torch.tensor(starts)[self._table_of_feature],
            self._dim_offsets,
            max(self.feature_dims),
            hash_sizes,
            self._hash_bits(hash_sizes),
            call.indices,
            call.offsets,
            _POOLING[self.pooling],
            call.per_sample_weights,
        )
        return out

    # ------------------------------------------------------------------------------------------------- caches

    def flush(self) -> None:
        """Write cached rows back; there are none here."""

    def purge(self) -> None:
        """Drop cached rows; there are none here."""

    def prefetch(self, indices: Tensor, offsets: Tensor, forward_stream: Any = None) -> None:
        """Bring rows into the cache; there is none here."""


class _FusedLookup(torch.autograd.Function):
    """Look up; in the backward update the rows and give the gradient of the per-sample weights."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, group: TableGroup, indices: Tensor, offsets: Tensor
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
        flat = self._flat_gradient(call, [max(s.rows, 1) for s in self.shapes]).to(self.weights.dtype)
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
