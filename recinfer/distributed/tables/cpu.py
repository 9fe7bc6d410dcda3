"""TableGroup: tables that one kernel call looks up on CPU, with an optimizer in the backward.

FBGEMM's forward and backward operators are called separately, on one flat tensor of rows. The backward of a lookup is a
method (:meth:`TableGroup.update`), so it can also run with ids and gradients of other ranks. Row-wise Adagrad has a
kernel of recinfer's (:mod:`recinfer.distributed.tables.rowwise_adagrad`). Where FBGEMM has no CPU operator, a formula of
:mod:`recinfer.optim.row_updates` updates the rows; their gradients are computed by a lookup in which each row is a bag of
output gradients. CUDA: :mod:`recinfer.distributed.tables.cuda`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.tables.replicas import LookupGradient, Replicas
from recinfer.distributed.tables.rowwise_adagrad import RowwiseAdagrad
from recinfer.distributed.tables.spans import OUTPUT, POOLING, Span, TableShape, rows_of, spans_of, sums_of
from recinfer.distributed.tables.variable_batch import padded_offsets, rank_major
from recinfer.distributed.types import BoundsCheckMode
from recinfer.distributed.types.enums import OptimType
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

__all__ = ["TableGroup", "TableShape"]

_WEIGHTS = (torch.float32, torch.float16)
_CHUNK = 1 << 16  # elements of the rows that are stepped together
_KERNELS = {OptimType.SGD: "sgd", OptimType.ADAGRAD: "adagrad", OptimType.ROWWISE_ADAGRAD: "rowwise_adagrad"}
_OUTSIDE = "out of bounds"  # in the operators' message


class TableGroup(nn.Module):
    """Tables that one call looks up on CPU, with an optimizer that updates their rows in the backward.

    Args:
        shapes: the tables.
        pooling: SUM, MEAN or NONE (one vector per id; all tables of one dim).
        settings: the update, bounds check and output type.
        dtype: dtype of the rows, float32 or float16.
        device: ``cpu`` or ``meta``.

    Raises:
        ConfigError: dtypes without a kernel, or unpooled tables with different dims.

    Attributes:
        param_group: ``{"lr": rate}``, which every update reads.
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
            raise ConfigError(
                f"unpooled tables of one group must have the same dim; got {sorted({s.dim for s in shapes})}"
            )
        self.shapes = tuple(shapes)
        self.pooling = pooling
        self.settings = settings
        self.param_group: dict[str, Any] = {"lr": settings.learning_rate}
        self.replicas: Replicas | None = None
        self.feature_dims = [s.dim for s in shapes for _ in range(s.num_features)]
        # Tables are not leaf tensors; this leaf makes autograd run the backward.
        self._anchor = torch.empty(0, requires_grad=True)
        self._build(dtype, device)

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        """Rows, state, and the operators' arguments that never change."""
        if dtype not in _WEIGHTS or self.settings.output_dtype not in OUTPUT:
            raise ConfigError(
                f"tables of {dtype} with outputs of {self.settings.output_dtype}; the CPU kernels support float32 "
                "and float16"
            )
        shapes = self.shapes
        # The kernels identify tables by their first row, so a table without rows gets a hidden one.
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

        self._placements = torch.zeros(len(of_feature), dtype=torch.int32)
        self._weights_offsets = tensor([self._starts[t] for t in of_feature])
        self._row_offsets = tensor([self._row_starts[t] for t in of_feature])
        self._hash_sizes = tensor([*(self._row_starts[t] for t in of_feature), self._row_starts[-1]])
        self._hash_bits = int(math.log2(self._row_starts[-1] or 1) + 1)
        self._dim_offsets = tensor([0, *accumulate(self.feature_dims)], torch.int32)
        self._rows_per_feature = tensor([shapes[t].rows for t in of_feature])
        self._warnings = torch.zeros(1, dtype=torch.int64)
        self._spans = spans_of(shapes, self._starts, self._row_starts)
        self._adagrad = RowwiseAdagrad(shapes, self._starts, self._row_starts, self.pooling)

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
        """Hook that is called after a step count was loaded into ``steps``."""

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
            :func:`recinfer.distributed.tables.variable_batch.rank_major`.

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
            # The operators check all ids except -1, which sharded modules refuse before they send ids.
            if _OUTSIDE not in str(error):
                raise
            indices = self._within_bounds(error, indices, offsets)
            out = self._differentiable(indices, offsets, per_sample_weights)
        if batch_sizes is not None and self.pooling is not PoolingType.NONE:
            out = rank_major(out, batch_sizes, self.feature_dims)
        return out

    def _differentiable(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """The lookup, with :meth:`_leaf_gradients` as its backward."""
        out: Tensor = _Lookup.apply(self, indices, offsets, per_sample_weights, *self._leaves())
        return out

    def _leaves(self) -> Iterable[Tensor]:
        """The tensors that make autograd run the backward."""
        return (self._anchor,)

    def _leaf_gradients(self, call: LookupGradient) -> Sequence[Tensor | None]:
        """Update the rows; the gradient of each of the leaves."""
        self.update(call.indices, call.offsets, call.per_sample_weights, call.grad_output)
        return (None,)

    def _within_bounds(self, error: RuntimeError, indices: Tensor, offsets: Tensor) -> Tensor:
        """``indices``, with row 0 instead of ids outside their table if the settings allow such ids."""
        mode = self.settings.bounds_check_mode
        if mode not in (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE):
            raise InputError(
                f"an id outside its table, in a lookup of {[(s.name, s.rows) for s in self.shapes]} (name, rows): "
                f"{str(error).splitlines()[0]}; pass ids from 0, or use bounds_check_mode=WARNING to read row 0 instead"
            ) from error
        indices = indices.clone()
        torch.ops.fbgemm.bounds_check_indices(self._rows_per_feature, indices, offsets, mode.value, self._warnings)
        return indices.clamp_(min=0)  # the operator accepts -1 as a pruned row

    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """The vectors of :meth:`forward`, without bounds check and without gradients; ``offsets`` has ``indices``'
        dtype."""
        ops, output = torch.ops.fbgemm, OUTPUT[self.settings.output_dtype]
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
            POOLING[self.pooling],
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
        """Step the optimizer on the rows of ``indices``, given the gradient of :meth:`lookup`'s output."""
        call = self._gathered_from_replicas(indices, offsets, per_sample_weights, grad_output)
        if self.steps is not None:
            self.steps += 1
        if not call.indices.numel():
            return
        if self.settings.has_cpu_kernel:
            self._update_by_kernel(call)
        else:
            self._update_by_formula(call)

    def _gathered_from_replicas(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, grad_output: Tensor
    ) -> LookupGradient:
        """The lookup and its clipped gradient, joined with the lookups of other replicas if the table has replicas."""
        call = LookupGradient(indices, offsets, per_sample_weights, self.clipped(grad_output).contiguous())
        if self.replicas is None:
            return call
        return self.replicas.gather(call, len(self.feature_dims), self.pooling is not PoolingType.NONE)

    def clipped(self, grad_output: Tensor) -> Tensor:
        """``grad_output``, limited if the settings say so. The limit holds for the mean of the ranks' losses: gradients of
        replicas are divided by the number of ranks later."""
        if not self.settings.gradient_clipping:
            return grad_output
        limit = self.settings.max_gradient * (1 if self.replicas is None else self.replicas.pg.size())
        return grad_output.clamp(-limit, limit)

    def _update_by_kernel(self, call: LookupGradient) -> None:
        settings, ops = self.settings, torch.ops.fbgemm
        rowwise = settings.optimizer is OptimType.ROWWISE_ADAGRAD
        if rowwise and self._adagrad.takes(self.weights, call.grad_output):
            rate_now = float(self.param_group["lr"])
            self._adagrad.step(self.weights, self._states["momentum1"], call, rate_now, settings.eps)
            return
        name, rate = _KERNELS[settings.optimizer], torch.tensor(float(self.param_group["lr"]), dtype=torch.float32)
        state: tuple[Any, ...] = (rate,)
        if settings.optimizer is not OptimType.SGD:
            places = self._weights_offsets if settings.optimizer is OptimType.ADAGRAD else self._row_offsets
            state = (self._states["momentum1"], self._placements, places, rate, settings.eps)
        tables = (self.weights, self._placements, self._weights_offsets)
        ids = (self._hash_sizes, self._hash_bits, call.indices, call.offsets)
        rounding = settings.stochastic_rounding
        if self.pooling is PoolingType.NONE:
            op = getattr(ops, f"split_embedding_nobag_backward_codegen_{name}_cpu")
            op(call.grad_output, *tables, self.shapes[0].dim, *ids, rounding, *state)
            return
        op = getattr(ops, f"split_embedding_backward_codegen_{name}_cpu")
        dims, bags = (self._dim_offsets, max(self.feature_dims)), (POOLING[self.pooling], call.per_sample_weights)
        op(call.grad_output, *tables, *dims, *ids, *bags, rounding, *state)

    def _update_by_formula(self, call: LookupGradient) -> None:
        update = UPDATES[self.settings.optimizer.value]
        hyper = self.settings.hyper(float(self.param_group["lr"]))
        count = int(self.steps) if self.steps is not None else 0
        for span, rows, grad in self._row_gradients(call):
            tables = {
                name: self._states[name][span.rows] if rowwise else span.matrix(self._states[name])
                for name, rowwise in update.states.items()
            }
            touched = {name: rows_of(table, rows) for name, table in tables.items()}
            weights = span.matrix(self.weights)
            new = update.step(rows_of(weights, rows), grad, touched, hyper, count)
            weights.index_copy_(0, rows, new.to(weights.dtype))
            for name, table in tables.items():
                table.index_copy_(0, rows, touched[name])

    def _row_gradients(self, call: LookupGradient) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Spans with touched rows (int64 ``[R]``, each once) and their gradients (float32 ``[R, dim]``), in chunks."""
        num_bags = (call.offsets.numel() - 1) // len(self.feature_dims)
        for span in self._spans:
            lengths = call.offsets[span.features.start * num_bags : span.features.stop * num_bags + 1].diff()
            first = int(call.offsets[span.features.start * num_bags])
            count = int(call.offsets[span.features.stop * num_bags]) - first
            if not count:
                continue
            ids = slice(first, first + count)
            starts = span.row_starts.repeat_interleave(num_bags).repeat_interleave(lengths, output_size=count)
            rows, order = torch.sort(call.indices[ids] + starts, stable=True)
            rows, counts = torch.unique_consecutive(rows, return_counts=True)
            bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            gradients, source, scales = self._sources(span, call, ids, lengths, order)
            # Chunks with temporaries that stay in the cache: new pages cost several times as much as the computation.
            size = max(1, _CHUNK // span.dim)
            for start in range(0, rows.numel(), size):
                ends = bounds[start : start + size + 1]
                part = slice(int(ends[0]), int(ends[-1]))
                grad = sums_of(gradients, source[part], ends - ends[0], None if scales is None else scales[part])
                yield span, rows[start : start + size], grad

    def _sources(
        self, span: Span, call: LookupGradient, ids: slice, lengths: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A matrix of gradients; for each id, in ``order``, its row in the matrix; and the weight of that row."""
        scales = None if call.per_sample_weights is None else call.per_sample_weights[ids]
        if self.pooling is PoolingType.NONE:
            return call.grad_output[ids], order, None
        # The gradient of bag b of feature f is row b * F + f of the span's columns.
        gradients = call.grad_output[:, span.columns].contiguous().view(-1, span.dim)
        bags = torch.arange(gradients.shape[0]).view(-1, span.row_starts.numel()).t().reshape(-1)
        if self.pooling is PoolingType.MEAN:
            shares = lengths.float().reciprocal().repeat_interleave(lengths, output_size=order.numel())
            scales = shares if scales is None else shares * scales
        source = bags.repeat_interleave(lengths, output_size=order.numel())
        return gradients, source[order], None if scales is None else scales[order]

    # ------------------------------------------------------------------------------------------------- caches

    def flush(self) -> None:
        """No effect: there is no cache on CPU."""

    def purge(self) -> None:
        """No effect: there is no cache on CPU."""

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: Any = None,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """No effect: there is no cache on CPU."""

    def drop_prefetched(self) -> None:
        """No effect: there is no cache on CPU."""

    @property
    def keeps_prefetched(self) -> bool:
        """Whether rows may be prefetched before the previous lookup's backward; always True without a cache."""
        return True


class _Lookup(torch.autograd.Function):
    """Look up; the backward returns the gradients of per-sample weights and of the group's leaves."""

    @staticmethod
    def forward(
        ctx: Any, group: TableGroup, indices: Tensor, offsets: Tensor, weights: Tensor | None, *leaves: Tensor
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(indices, offsets, weights)
        return group.lookup(indices, offsets, weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        indices, offsets, weights = ctx.saved_tensors
        grad_output = ctx.group.clipped(grad_output).contiguous()  # also for the weights, as in FBGEMM
        grad_weights = None
        if weights is not None and ctx.needs_input_grad[3]:  # before the update, which changes the rows read here
            grad_weights = ctx.group.per_sample_weight_gradient(grad_output, indices, offsets)
        gradients = ctx.group._leaf_gradients(LookupGradient(indices, offsets, weights, grad_output))
        return None, None, None, grad_weights, *gradients
