"""Lookups in the local shards of tables, pooled and unpooled: one kernel call for each group of tables.

Shapes: ``B`` bags per feature (of all ranks), ``N`` ids, ``D`` local columns of all features together.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.modules.module import _IncompatibleKeys

from recinfer.distributed.comm.autograd import get_gradient_division
from recinfer.distributed.tables.group_kernel import GroupKernel
from recinfer.distributed.tables.optimizer import (
    GroupFusedOptimizer,
    TablePiece,
    sharded_or_local,
)
from recinfer.distributed.tables.rank_lookup import RankLookup, embeddings_cat_empty_rank_handle
from recinfer.distributed.tables.replicas import Replicas
from recinfer.distributed.types import ShardingEnv, ShardingType
from recinfer.distributed.types.embedding_modules import BaseEmbeddingLookup, BaseGroupedFeatureProcessor
from recinfer.distributed.types.tables import GroupedEmbeddingConfig
from recinfer.errors import CheckpointError, ConfigError
from recinfer.module_tree import append_prefix
from recinfer.modules.embedding_configs import PoolingType
from recinfer.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from recinfer.optim.keyed import KeyedOptimizer
from recinfer.optim.local_tensors import local_tensors
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["GroupedEmbeddingsLookup", "GroupedPooledEmbeddingsLookup", "fx_wrap_tensor_view2d"]


def fx_wrap_tensor_view2d(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """``x.view(dim0, dim1)``."""
    return x.view(dim0, dim1)


class _GroupedLookup(BaseEmbeddingLookup[KeyedJaggedTensor, Tensor], FusedOptimizerModule):  # type: ignore[type-var]
    """Base of pooled and unpooled lookups: the groups, their parameters and their state."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        pooled: bool,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> None:
        super().__init__()
        self.grouped_configs = grouped_configs
        self._pg = pg = pg if pg is not None or env is None else env.process_group
        self._mesh = None if env is None else env.state_mesh
        replicas = _replicas(sharding_type, pg)
        self._emb_modules = nn.ModuleList(
            [GroupKernel(config, config.pooling if pooled else PoolingType.NONE, device) for config in grouped_configs]
        )
        self._rank: RankLookup[Any] = RankLookup(grouped_configs, self._emb_modules)
        if replicas is not None:
            for kernel in self._kernels():
                kernel.group.replicas = replicas if kernel.is_fused else None
        self._empty = torch.empty(0, device=device, requires_grad=True)
        fused = [(k.group, k.pieces) for k in self._kernels() if k.is_fused]
        self._fused_optimizer: FusedOptimizer = (
            GroupFusedOptimizer(fused, pg, self._mesh) if fused else EmptyFusedOptimizer()
        )

    def _kernels(self) -> Iterator[GroupKernel]:
        for module in self._emb_modules:
            assert isinstance(module, GroupKernel)
            yield module

    # ------------------------------------------------------------------------------------------------- parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """``<prefix>.<table>.weight`` of every local shard, a view on the kernel's rows."""
        for name, parameter in self.named_parameters_by_table():
            yield append_prefix(prefix, f"{name}.weight"), parameter

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Table name and parameter of every local shard; a table that is sharded by columns occurs once per shard."""
        for kernel in self._kernels():
            for piece in kernel.pieces:
                yield piece.table.name, piece.parameter

    def pieces_of(self, table: str) -> list[TablePiece]:
        """The local shards of a table, with the state of their optimizer."""
        return [piece for kernel in self._kernels() for piece in kernel.pieces if piece.table.name == table]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """No buffers: rows are parameters, and the rest of a kernel's state is private to it."""
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
        """``<prefix><table>.weight`` -> ShardedTensor (DTensor where ``env`` says so) where the shards' positions are
        known, else a tensor of the rows."""
        self.flush()
        result: dict[str, Any] = OrderedDict() if destination is None else destination
        by_table: dict[str, list[TablePiece]] = defaultdict(list)
        for kernel in self._kernels():
            for piece in kernel.pieces:
                by_table[piece.table.name].append(piece)
        for name, pieces in by_table.items():
            rows = [p.parameter if keep_vars else p.parameter.detach() for p in pieces]
            result[f"{prefix}{name}.weight"] = sharded_or_local(pieces, rows, self._pg, self._mesh)
        return result

    @torch.no_grad()
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Tensor | ShardedTensor], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Copy rows from a state of :meth:`state_dict`.

        Returns:
            Keys that were missing and keys without a table.

        Raises:
            CheckpointError: rows of another shape; or, with ``strict``, missing or unexpected keys; or ``assign``,
                because the kernel reads the rows in place.
        """
        if assign:
            raise CheckpointError(
                "assign=True: kernels read their rows in place, so they cannot be replaced; load with assign=False"
            )
        self.flush()  # tables that are missing in the loaded state keep their changed rows
        self.purge()
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
        """Write cached rows back to the tables."""
        for kernel in self._kernels():
            kernel.group.flush()

    def purge(self) -> None:
        """Drop cached rows."""
        for kernel in self._kernels():
            kernel.group.purge()

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Load the rows of ``sparse_features`` into the caches."""
        for kernel, features in self._rank.calls(sparse_features):
            kernel.prefetch(features, forward_stream)

    def drop_prefetched(self) -> None:
        """Drop rows that were prefetched and not looked up."""
        for kernel in self._kernels():
            kernel.group.drop_prefetched()

    # ------------------------------------------------------------------------------------------------- training

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the fused groups; without parameters when all groups are dense."""
        return self._fused_optimizer

    def sync_replicas(self) -> None:
        """Copy rows and optimizer state of the first rank to every replica; does nothing without replicas.

        All ranks must call it, after the rows have been initialised.
        """
        for kernel in self._kernels():
            if kernel.group.replicas is not None:
                tensors = [t for p in kernel.pieces for t in (p.parameter.data, *p.state.values())]
                steps = kernel.group.steps
                kernel.group.replicas.broadcast(tensors if steps is None else [*tensors, steps])
                kernel.group.steps_loaded()


def _replicas(sharding_type: ShardingType | None, pg: dist.ProcessGroup | None) -> Replicas | None:
    return Replicas(pg) if sharding_type is ShardingType.DATA_PARALLEL and pg is not None else None


def _copy_in(name: str, parameters: list[nn.Parameter], source: Tensor | ShardedTensor) -> None:
    rows = local_tensors(source)
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
        device: device of the rows.
        pg: the ranks that hold the other shards.
        feature_processor: computes the weights of groups with ``has_feature_processor``.
        scale_weight_gradients: undo, for gradients of per-sample weights, the collectives' division by world size.
            Not for replicas, whose vectors are not exchanged.
        sharding_type: data_parallel makes fused groups replicas that apply all ranks' gradients.
        env: with ``output_dtensor``, state holds DTensors; its process group is used if ``pg`` is None.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        pg: dist.ProcessGroup | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        scale_weight_gradients: bool = True,
        sharding_type: ShardingType | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, pg, True, sharding_type, env)
        pg = self._pg
        processed = any(config.has_feature_processor for config in grouped_configs)
        if grouped_configs and processed != (feature_processor is not None):
            raise ConfigError(
                f"feature_processor is {'missing' if processed else 'given'} and "
                f"{'a group has' if processed else 'no group has'} has_feature_processor=True; expected both or neither"
            )
        self._feature_processor = feature_processor
        exchanged = pg is not None and sharding_type is not ShardingType.DATA_PARALLEL
        self._scale_gradient_factor = pg.size() if pg is not None and exchanged and scale_weight_gradients else 1

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, D]``; with variable batch per feature one dimension, rank by rank (see :class:`TableGroup`)."""
        calls = self._rank.calls(sparse_features)
        factor = self._scale_gradient_factor if get_gradient_division() else 1
        pooled = [kernel(self._processed(kernel, features), factor) for kernel, features in calls]
        if sparse_features.variable_stride_per_key():
            return self._merge_ranks(pooled, calls)
        nothing = fx_wrap_tensor_view2d(self._empty, sparse_features.stride(), 0)
        return embeddings_cat_empty_rank_handle(pooled, nothing, dim=1)

    def _merge_ranks(self, pooled: list[Tensor], calls: list[tuple[GroupKernel, KeyedJaggedTensor]]) -> Tensor:
        """Merge one-dimensional outputs of several groups, each ordered by rank, into one that is ordered by rank, then
        group."""
        if len(pooled) < 2:
            return embeddings_cat_empty_rank_handle(pooled, self._empty)
        parts = []
        for (kernel, features), out in zip(calls, pooled):
            of_feature = zip(features.stride_per_key_per_rank(), kernel.group.feature_dims)
            sizes = torch.tensor([[n * dim for n in strides] for strides, dim in of_feature]).sum(dim=0)
            parts.append(out.split(sizes.tolist()))
        return torch.cat([part for of_rank in zip(*parts) for part in of_rank])

    def _processed(self, kernel: GroupKernel, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        config = kernel.config
        if config.has_feature_processor and self._feature_processor is not None:
            features = self._feature_processor(features)
        return features


class GroupedEmbeddingsLookup(_GroupedLookup):
    """One vector per id, of the local shards.

    Args:
        grouped_configs: the groups, each of tables with one number of local columns; features come in their order.
        pg: the ranks that hold the other shards.
        device: device of the rows.
        sharding_type: data_parallel makes fused groups replicas that apply all ranks' gradients.
        env: with ``output_dtensor``, state holds DTensors; its process group is used if ``pg`` is None.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, pg, False, sharding_type, env)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[N, dim]``, feature by feature; one dimension when groups have different dims."""
        vectors = self._rank(sparse_features)
        if len({v.shape[1] for v in vectors}) > 1:
            vectors = [v.reshape(-1) for v in vectors]
        return embeddings_cat_empty_rank_handle(vectors, self._empty)
