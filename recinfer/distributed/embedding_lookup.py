"""Looking up the local shards of tables: groups of tables that one kernel call serves, pooled and unpooled.

Shapes: ``B`` bags a feature (of all ranks), ``N`` ids, ``D`` local columns of all features together.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.nn.modules.module import _IncompatibleKeys

from recinfer.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.tbe import DenseTableGroup, TableGroup, TableShape
from recinfer.distributed.types import ShardingType
from recinfer.errors import CheckpointError
from recinfer.modules.embedding_configs import PoolingType, data_type_to_dtype
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "CommOpGradientScaling",
    "GroupedEmbeddingsLookup",
    "GroupedPooledEmbeddingsLookup",
    "embeddings_cat_empty_rank_handle",
    "fx_wrap_tensor_view2d",
]


def fx_wrap_tensor_view2d(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """``x.view(dim0, dim1)``."""
    return x.view(dim0, dim1)


def embeddings_cat_empty_rank_handle(embeddings: list[Tensor], dummy_embs_tensor: Tensor, dim: int = 0) -> Tensor:
    """The groups' vectors as one tensor, joined along ``dim``; ``dummy_embs_tensor`` where a rank has no table."""
    if not embeddings:
        return dummy_embs_tensor
    return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=dim)


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


class _GroupKernel(nn.Module):
    """One grouped config and the tables that its kernel looks up."""

    def __init__(self, config: GroupedEmbeddingConfig, pooling: PoolingType, device: torch.device | None) -> None:
        super().__init__()
        self.config = config
        self.tables = config.embedding_tables
        self.is_fused = config.compute_kernel is not EmbeddingComputeKernel.DENSE
        shapes = [TableShape(t.name, t.local_rows, t.local_cols, t.num_features()) for t in self.tables]
        settings = FusedSettings.from_params(_fused_params(config)) if self.is_fused else FusedSettings()
        kind = TableGroup if self.is_fused else DenseTableGroup
        self.group = kind(shapes, pooling, settings, data_type_to_dtype(config.data_type), device)
        self._reset_parameters()
        if isinstance(self.group, DenseTableGroup):
            self.table_parameters = list(self.group.tables)
        else:
            self.table_parameters = [nn.Parameter(view) for view in self.group.table_weights()]

    def _reset_parameters(self) -> None:
        if self.group.weights.is_meta:
            return
        for table, view in zip(self.tables, self.group.table_weights()):
            with torch.no_grad():
                if table.init_fn is not None:
                    table.init_fn(view)
                else:
                    view.uniform_(table.get_weight_init_min(), table.get_weight_init_max())

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        weights = features.weights_or_none() if self.config.is_weighted else None
        batch_sizes = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        out: Tensor = self.group(features.values(), features.offsets(), weights, batch_sizes)
        return out

    def named_tables(self) -> Iterator[tuple[ShardedEmbeddingTable, nn.Parameter]]:
        """Each table with the parameter that views its rows."""
        yield from zip(self.tables, self.table_parameters)


def _fused_params(config: GroupedEmbeddingConfig) -> dict[str, Any]:
    params = dict(config.fused_params or {})
    if not params and config.embedding_tables:
        params = dict(config.embedding_tables[0].fused_params or {})
    return params


class _GroupedLookup(BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]):  # type: ignore[type-var]
    """What pooled and unpooled lookups share: the groups, their parameters and their state."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        pooled: bool,
    ) -> None:
        super().__init__()
        self.grouped_configs = grouped_configs
        self._pg = pg
        self._feature_splits = [config.num_features() for config in grouped_configs]
        self._emb_modules = nn.ModuleList(
            [_GroupKernel(config, config.pooling if pooled else PoolingType.NONE, device) for config in grouped_configs]
        )
        self._nothing = torch.empty(0, device=device, requires_grad=True)

    def _kernels(self) -> Iterator[_GroupKernel]:
        for module in self._emb_modules:
            assert isinstance(module, _GroupKernel)
            yield module

    def _features(self, sparse_features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        if not self._feature_splits:
            return []
        if len(self._feature_splits) == 1:
            return [sparse_features]
        return sparse_features.split(self._feature_splits)

    # ------------------------------------------------------------------------------------------------- parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """``<prefix>.<table>.weight`` of every local shard, a view on the kernel's rows."""
        for name, parameter in self.named_parameters_by_table():
            yield _join(prefix, f"{name}.weight"), parameter

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Table name and parameter of every local shard; a table cut in columns comes once a shard."""
        for kernel in self._kernels():
            for table, parameter in kernel.named_tables():
                yield table.name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Nothing: rows are parameters, and what else a kernel keeps is its own."""
        yield from ()

    def named_split_embedding_weights(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """``<prefix>.<table>.weight`` and the rows ``[rows, dim]`` of every local shard, without autograd."""
        for name, parameter in self.named_parameters(prefix):
            yield name, parameter.detach()

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows ``[rows, dim]`` of every local shard, group by group."""
        return [weight for _, weight in self.named_split_embedding_weights()]

    # ------------------------------------------------------------------------------------------------- state

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """``<prefix><table>.weight`` -> ShardedTensor where the shard knows its place in the table, else the rows."""
        result: dict[str, Any] = OrderedDict() if destination is None else destination
        shards: dict[str, list[Shard]] = defaultdict(list)
        whole: dict[str, Any] = {}
        for kernel in self._kernels():
            for table, parameter in kernel.named_tables():
                key = f"{prefix}{table.name}.weight"
                rows = parameter if keep_vars else parameter.detach()
                if table.global_metadata is not None and table.local_metadata is not None and self._pg is not None:
                    shards[key].append(Shard(rows, table.local_metadata))
                    whole[key] = table.global_metadata
                else:
                    result[key] = rows
        for key, local in shards.items():
            result[key] = ShardedTensor._init_from_local_shards_and_global_metadata(
                local_shards=local, sharded_tensor_metadata=whole[key], process_group=self._pg
            )
        return result

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Tensor | ShardedTensor], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Copy rows in from what :meth:`state_dict` gave.

        Returns:
            Keys that were missing and keys that no table has.

        Raises:
            CheckpointError: rows of another shape; or, with ``strict``, missing or unexpected keys.
        """
        wanted: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self.named_parameters():
            wanted[name].append(parameter)
        for name, parameters in wanted.items():
            if name in state_dict:
                _copy_in(name, parameters, state_dict[name])
        missing = [name for name in wanted if name not in state_dict]
        unexpected = [name for name in state_dict if name not in wanted]
        if strict and (missing or unexpected):
            raise CheckpointError(f"state of a lookup: missing keys {missing}, unexpected keys {unexpected}")
        return _IncompatibleKeys(missing, unexpected)

    # ------------------------------------------------------------------------------------------------- caches

    def flush(self) -> None:
        """Write cached rows back to the tables; nothing to do where rows are not cached."""

    def purge(self) -> None:
        """Drop cached rows; nothing to do where rows are not cached."""

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Bring the rows of ``sparse_features`` into the cache; nothing to do where rows are not cached."""


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _copy_in(name: str, parameters: list[nn.Parameter], source: Tensor | ShardedTensor) -> None:
    rows = [shard.tensor for shard in source.local_shards()] if isinstance(source, ShardedTensor) else [source]
    if [r.shape for r in rows] != [p.shape for p in parameters]:
        raise CheckpointError(
            f"{name}: got shards of shapes {[tuple(r.shape) for r in rows]}; expected "
            f"{[tuple(p.shape) for p in parameters]}"
        )
    for parameter, new in zip(parameters, rows):
        parameter.copy_(new)


class GroupedPooledEmbeddingsLookup(_GroupedLookup):
    """Pooled vectors of the local shards.

    Args:
        grouped_configs: the groups; features come in their order.
        device: where the rows lie.
        pg: the ranks that hold the other shards.
        feature_processor: turns features into weighted features before the lookup.
        scale_weight_gradients: undo, for gradients of per-sample weights, the collectives' division by world size.
        sharding_type: data_parallel makes fused groups replicas that apply all ranks' gradients.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        pg: dist.ProcessGroup | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        scale_weight_gradients: bool = True,
        sharding_type: ShardingType | None = None,
        env: Any = None,
    ) -> None:
        super().__init__(grouped_configs, device, pg, pooled=True)
        self._feature_processor = feature_processor
        self._scale_gradient_factor = pg.size() if scale_weight_gradients and pg is not None else 1

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, D]``; with variable batch per feature one dimension, rank by rank (see :class:`TableGroup`)."""
        features = self._features(sparse_features)
        pooled = [kernel(self._processed(kernel, f)) for kernel, f in zip(self._kernels(), features)]
        if sparse_features.variable_stride_per_key():
            return self._merge_ranks(pooled, features)
        nothing = fx_wrap_tensor_view2d(self._nothing, sparse_features.stride(), 0)
        return embeddings_cat_empty_rank_handle(pooled, nothing, dim=1)

    def _merge_ranks(self, pooled: list[Tensor], features: list[KeyedJaggedTensor]) -> Tensor:
        """One-dimensional outputs of several groups, each rank by rank -> one, rank by rank and in it group by group."""
        if len(pooled) < 2:
            return embeddings_cat_empty_rank_handle(pooled, self._nothing)
        parts = []
        for kernel, out, group in zip(self._kernels(), pooled, features):
            of_feature = zip(group.stride_per_key_per_rank(), kernel.group.feature_dims)
            sizes = torch.tensor([[n * dim for n in strides] for strides, dim in of_feature]).sum(dim=0)
            parts.append(out.split(sizes.tolist()))
        return torch.cat([part for of_rank in zip(*parts) for part in of_rank])

    def _processed(self, kernel: _GroupKernel, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        config = kernel.config
        if config.has_feature_processor and self._feature_processor is not None:
            features = self._feature_processor(features)
        return features


class GroupedEmbeddingsLookup(_GroupedLookup):
    """One vector an id, of the local shards.

    Args:
        grouped_configs: the groups, each of tables with one number of local columns; features come in their order.
        pg: the ranks that hold the other shards.
        device: where the rows lie.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        env: Any = None,
    ) -> None:
        super().__init__(grouped_configs, device, pg, pooled=False)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[N, dim]``, feature by feature; one dimension when groups have different dims."""
        vectors = [kernel(f) for kernel, f in zip(self._kernels(), self._features(sparse_features))]
        if len({v.shape[1] for v in vectors}) > 1:
            vectors = [v.reshape(-1) for v in vectors]
        return embeddings_cat_empty_rank_handle(vectors, self._nothing)
