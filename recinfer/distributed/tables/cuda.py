"""Groups of tables on a GPU: adapters of FBGEMM's training modules (TBE), with caches and placements.

No other file imports FBGEMM's training classes. Their interface is that of the groups on CPU,
:mod:`recinfer.distributed.tables.cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer import fbgemm
from recinfer.distributed.fused_params import FusedSettings, WeightDecayMode
from recinfer.distributed.tables.cpu import TableGroup, TableShape
from recinfer.distributed.tables.cpu_dense import DenseTableGroup
from recinfer.distributed.tables.replicas import LookupGradient
from recinfer.distributed.tables.variable_batch import padded_offsets
from recinfer.distributed.types import BoundsCheckMode
from recinfer.distributed.types.enums import OptimType
from recinfer.distributed.types.kernels import EmbeddingLocation
from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.optim.row_updates import UPDATES

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode as FbgemmBoundsCheck
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm as FbgemmCacheAlgorithm
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation as FbgemmLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as FbgemmDecay
except ImportError as error:
    raise UnavailableError(
        "FBGEMM is not installed; install recinfer with its extra 'cpu' (or 'cuda' on a GPU machine): "
        f"pip install 'recinfer[cpu]' ({error})"
    ) from error

__all__ = ["ModuleDenseTableGroup", "ModuleTableGroup", "make_table_group"]

_SPARSE_TYPES = {
    torch.float32: SparseType.FP32,
    torch.float16: SparseType.FP16,
    torch.bfloat16: SparseType.BF16,
}
_OPTIMIZERS = {
    OptimType.SGD: EmbOptimType.EXACT_SGD,
    OptimType.ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
    OptimType.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.ADAM: EmbOptimType.ADAM,
    OptimType.PARTIAL_ROWWISE_ADAM: EmbOptimType.PARTIAL_ROWWISE_ADAM,
    OptimType.LAMB: EmbOptimType.LAMB,
    OptimType.PARTIAL_ROWWISE_LAMB: EmbOptimType.PARTIAL_ROWWISE_LAMB,
    OptimType.LARS_SGD: EmbOptimType.LARS_SGD,
}
# Kernels that silently ignore weight_decay_mode.
_NO_DECAY_MODE = frozenset({OptimType.SGD, OptimType.ADAGRAD})


def make_table_group(
    shapes: Sequence[TableShape],
    pooling: PoolingType,
    settings: FusedSettings | None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    location: EmbeddingLocation = EmbeddingLocation.DEVICE,
) -> TableGroup:
    """The group for ``device``: FBGEMM's operators on CPU and meta, its modules on other devices.

    Args:
        settings: settings of the update in the backward; None gives a dense group, whose tables are parameters.
        location: memory of the rows of a GPU's group; ignored on CPU.

    Raises:
        UnavailableError: a GPU, and FBGEMM's build here is the one for CPU.
    """
    on_cpu = device is None or torch.device(device).type in ("cpu", "meta")
    if not on_cpu and not fbgemm.HAS_CUDA:
        raise UnavailableError(
            f"tables that train on {device} need FBGEMM's CUDA build, and the one here is for CPU: pip install "
            "'recinfer[cuda]'. One process alone trains on a GPU without it (recinfer train --device cuda)"
        )
    if settings is None:
        kind = DenseTableGroup if on_cpu else ModuleDenseTableGroup
        return kind(shapes, pooling, FusedSettings(), dtype, device)
    if on_cpu:
        return TableGroup(shapes, pooling, settings, dtype, device)
    return ModuleTableGroup(shapes, pooling, settings, dtype, device, location)


class ModuleTableGroup(TableGroup):
    """A group whose rows and state belong to an FBGEMM module.

    Raises:
        ConfigError: a number of columns that is not a multiple of 4, or a weight decay that the kernel does not
            support.
    """

    tbe: SplitTableBatchedEmbeddingBagsCodegen

    def __init__(
        self,
        shapes: Sequence[TableShape],
        pooling: PoolingType,
        settings: FusedSettings,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        location: EmbeddingLocation = EmbeddingLocation.DEVICE,
    ) -> None:
        self._location = location
        super().__init__(shapes, pooling, settings, dtype, device)

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        settings, shapes = self.settings, self.shapes
        odd = [(s.name, s.dim) for s in shapes if s.dim % 4]
        if odd:
            raise ConfigError(
                f"FBGEMM's GPU kernels need a number of columns that is a multiple of 4; got {odd}: cut or pad the "
                "tables"
            )
        if settings.optimizer in _NO_DECAY_MODE and settings.weight_decay and settings.weight_decay_mode.value:
            raise ConfigError(
                f"FBGEMM's GPU kernel of {settings.optimizer.value} has no weight decay; got {settings.weight_decay} "
                f"with mode {settings.weight_decay_mode.name}; use ROWWISE_ADAGRAD or an Adam"
            )
        on_cpu = device is None or device.type == "cpu"
        place = FbgemmLocation.HOST if on_cpu else FbgemmLocation(self._location.value)
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(max(s.rows, 1), s.dim, place, compute) for s in shapes],
            feature_table_map=[t for t, s in enumerate(shapes) for _ in range(s.num_features)],
            pooling_mode=PoolingMode[self.pooling.name],
            weights_precision=_SPARSE_TYPES[dtype],
            output_dtype=_SPARSE_TYPES[settings.output_dtype],
            optimizer=_OPTIMIZERS[settings.optimizer],
            learning_rate=settings.learning_rate,
            eps=settings.eps,
            beta1=settings.beta1,
            beta2=settings.beta2,
            momentum=settings.momentum,
            eta=settings.eta,
            max_norm=settings.max_norm,
            weight_decay=settings.weight_decay,
            weight_decay_mode=_decay_mode(settings),
            gradient_clipping=settings.gradient_clipping,
            max_gradient=settings.max_gradient,
            stochastic_rounding=settings.stochastic_rounding,
            bounds_check_mode=FbgemmBoundsCheck(settings.bounds_check_mode.value),
            table_names=[s.name for s in shapes],
            device=device,
            **_placement(settings),
        )
        counts = UPDATES[settings.optimizer.value].counts_steps
        self.steps = self.tbe.iter if counts else None

    def steps_loaded(self) -> None:
        """Apply a step count that was loaded into :attr:`steps`."""
        if self.steps is not None:
            self.tbe.iter_cpu.fill_(int(self.steps))

    def table_weights(self) -> list[Tensor]:
        """A ``[rows, dim]`` view on the rows of each table."""
        return [w[: s.rows] for s, w in zip(self.shapes, self.tbe.split_embedding_weights())]

    def table_states(self) -> list[dict[str, Tensor]]:
        """The optimizer's state of each table, as FBGEMM keeps it."""
        names = list(UPDATES[self.settings.optimizer.value].states)
        if not names:
            return [{} for _ in self.shapes]
        split = self.tbe.split_optimizer_states()
        return [{n: state[: s.rows] for n, state in zip(names, states)} for s, states in zip(self.shapes, split)]

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Look up with the module; see :meth:`TableGroup.forward`."""
        self.tbe.set_learning_rate(float(self.param_group["lr"]))
        if self.replicas is not None or self.pooling is PoolingType.NONE:
            return super().forward(indices, offsets, per_sample_weights, batch_sizes)
        return self._run(indices, offsets, per_sample_weights, _lists(batch_sizes))

    def _run(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        batch_sizes: list[list[int]] | None = None,
    ) -> Tensor:
        """The module's forward. The module counts an optimizer step per call, which is right if its backward follows;
        after a lookup without gradients the count is restored."""
        steps = int(self.tbe.iter_cpu)
        out: Tensor = self.tbe(indices, offsets, per_sample_weights, batch_size_per_feature_per_rank=batch_sizes)
        if not torch.is_grad_enabled():
            self.tbe.iter_cpu.fill_(steps)
            self.tbe.iter.fill_(steps)
        return out

    def _differentiable(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        if self.replicas is not None:
            return super()._differentiable(indices, offsets, per_sample_weights)
        return self._run(indices, offsets, per_sample_weights)

    @torch.no_grad()
    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """The vectors of ``indices``; see :meth:`TableGroup.lookup`."""
        return self._run(indices, offsets, per_sample_weights)

    def per_sample_weight_gradient(self, grad_output: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """The gradient ``[N]`` of ``per_sample_weights``: each id's row times the gradient of its bag."""
        num_bags = (offsets.numel() - 1) // len(self.feature_dims)
        weights, found, column, feature = self.table_weights(), [], 0, 0
        for table, shape in enumerate(self.shapes):
            for _ in range(shape.num_features):
                bounds = offsets[feature * num_bags : (feature + 1) * num_bags + 1].long()
                ids = indices[int(bounds[0]) : int(bounds[-1])]
                bags = torch.repeat_interleave(torch.arange(num_bags, device=ids.device), bounds.diff())
                gradient = grad_output[bags, column : column + shape.dim]
                found.append((weights[table][ids.long()] * gradient).sum(dim=1))
                column, feature = column + shape.dim, feature + 1
        return torch.cat(found)

    def update(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, grad_output: Tensor) -> None:
        """Update the rows like :meth:`TableGroup.update`: the module looks up again and runs its own backward."""
        call = self._gathered_from_replicas(indices, offsets, per_sample_weights, grad_output)
        with torch.enable_grad():
            self._run(call.indices, call.offsets, call.per_sample_weights).backward(call.grad_output)

    def flush(self) -> None:
        """Write cached rows back."""
        self.tbe.flush()

    def purge(self) -> None:
        """Drop cached rows and the positions of prefetched ones."""
        self.drop_prefetched()
        self.tbe.reset_cache_states()

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: Any = None,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Load the rows of ``indices`` into the cache. Does nothing for replicas: their update looks up the ids of all
        ranks, which the module would take for the prefetched lookup."""
        if self.replicas is not None:
            return
        if batch_sizes is not None and self.pooling is PoolingType.NONE:  # as in forward
            offsets, batch_sizes = padded_offsets(offsets, batch_sizes), None
        self.tbe.prefetch(indices, offsets, forward_stream, _lists(batch_sizes))

    def drop_prefetched(self) -> None:
        """Drop calls of :meth:`prefetch` that no lookup will follow from the module's queue."""
        for places in self.tbe.lxu_cache_locations_list:
            if self.tbe.prefetch_pipeline:  # prefetched rows are locked until their backward
                torch.ops.fbgemm.lxu_cache_locking_counter_decrement(self.tbe.lxu_cache_locking_counter, places)
        self.tbe.lxu_cache_locations_list.clear()
        self.tbe.timesteps_prefetched.clear()

    @property
    def keeps_prefetched(self) -> bool:
        """With the setting ``prefetch_pipeline`` the cache locks the rows of a batch until its backward."""
        return self._location is not EmbeddingLocation.MANAGED_CACHING or bool(
            self.settings.placement.get("prefetch_pipeline")
        )


def _lists(batch_sizes: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    return None if batch_sizes is None else [list(of_feature) for of_feature in batch_sizes]


def _placement(settings: FusedSettings) -> dict[str, Any]:
    """The settings of the caches, in FBGEMM's own enumerations, which FBGEMM compares by identity."""
    given = dict(settings.placement)
    if "cache_algorithm" in given:
        given["cache_algorithm"] = FbgemmCacheAlgorithm[given["cache_algorithm"].name]
    if "cache_precision" in given:
        given["cache_precision"] = _SPARSE_TYPES[given["cache_precision"]]
    return given


def _decay_mode(settings: FusedSettings) -> FbgemmDecay:
    of_adagrad = settings.optimizer is OptimType.ROWWISE_ADAGRAD
    return FbgemmDecay((settings.weight_decay_mode if of_adagrad else WeightDecayMode.NONE).value)


class ModuleDenseTableGroup(DenseTableGroup):
    """A dense group on a GPU, by FBGEMM's dense operator; its gradient is split by table."""

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        super()._build(dtype, device)
        for name in ("_weights_offsets", "_dim_offsets", "_hash_sizes", "_rows_per_feature", "_warnings"):
            setattr(self, name, getattr(self, name).to(device))

    def _differentiable(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        # GPU kernels read at any id, so ids are checked before.
        mode = self.settings.bounds_check_mode
        if mode is not BoundsCheckMode.NONE:
            torch.ops.fbgemm.bounds_check_indices(self._rows_per_feature, indices, offsets, mode.value, self._warnings)
        return super()._differentiable(indices, offsets, per_sample_weights)

    def lookup(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """The vectors of ``indices``; see :meth:`TableGroup.lookup`."""
        return self._looked_up(self.weights, indices, offsets, per_sample_weights)

    def _looked_up(self, rows: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """The vectors of ``indices`` from ``rows``, a tensor like the flat one."""
        out: Tensor = torch.ops.fbgemm.dense_embedding_codegen_lookup_function(
            dev_weights=rows,
            weights_offsets=self._weights_offsets,
            D_offsets=self._dim_offsets,
            total_D=sum(self.feature_dims),
            max_D=max(self.feature_dims),
            hash_size_cumsum=self._hash_sizes,
            total_hash_size_bits=self._hash_bits,
            indices=indices,
            offsets=offsets,
            pooling_mode=PoolingMode[self.pooling.name].value,
            indice_weights=per_sample_weights,
            feature_requires_grad=None,
        )
        return out

    def per_sample_weight_gradient(self, grad_output: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """The gradient ``[N]`` of ``per_sample_weights``."""
        return ModuleTableGroup.per_sample_weight_gradient(self, grad_output, indices, offsets)  # type: ignore[arg-type]

    @torch.no_grad()
    def table_gradients(self, call: LookupGradient) -> list[Tensor]:
        """The gradient ``[rows, dim]`` of every table."""
        weights = None if call.per_sample_weights is None else call.per_sample_weights.detach()
        with torch.enable_grad():
            rows = self.weights.detach().requires_grad_()
            out = self._looked_up(rows, call.indices, call.offsets, weights)
        (flat,) = torch.autograd.grad(out, rows, call.grad_output)
        return [flat[b : b + s.rows * s.dim].view(s.rows, s.dim) for s, b in zip(self.shapes, self._starts)]
