"""Quantized tables of bags on the devices of one process: the sharding that feeds their lookups and joins what they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.dist_one import EmbeddingsAllToOne, KJTOneToAll
from recinfer.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingInfo,
)
from recinfer.distributed.embedding_types import (
    BaseGroupedFeatureProcessor,
    KJTList,
)
from recinfer.distributed.infer_lookup import InferGroupedPooledEmbeddingsLookup
from recinfer.distributed.sharding.features import ShardFeaturesDist
from recinfer.distributed.sharding.pooled import PooledContext, ShardPooledDist
from recinfer.distributed.sharding.tables import PooledSharding
from recinfer.distributed.types import ShardingEnv, ShardingType, rank_device
from recinfer.errors import ConfigError
from recinfer.quant.rows import row_bytes, slice_packed_columns
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["InferPooledSharding", "infer_sharding"]


class _InferFeaturesDist(BaseSparseFeaturesDist[KJTList]):
    def __init__(self, sharding: InferPooledSharding, device: torch.device | None) -> None:
        super().__init__()
        layout = sharding.layout
        self._expand = ShardFeaturesDist(layout, None)
        self._send = KJTOneToAll(layout.slots_per_rank, layout.world_size, device)

    def forward(self, sparse_features: KeyedJaggedTensor) -> KJTList:
        """Every device's ids, rebased to its rows."""
        return self._send(self._expand(sparse_features).wait().wait())


class _InferPooledDist(BaseEmbeddingDist[PooledContext, list[Tensor], Tensor]):
    def __init__(self, sharding: InferPooledSharding, device: torch.device) -> None:
        super().__init__()
        self._bring = EmbeddingsAllToOne(device, sharding.layout.world_size, cat_dim=1)
        self._combine = ShardPooledDist(sharding.layout, None, device)

    @torch.no_grad()
    def forward(self, local_embs: list[Tensor], sharding_ctx: PooledContext | None = None) -> Tensor:
        """``[B, sum of dims]`` in module order."""
        return self._combine(self._bring(local_embs), sharding_ctx).wait().detach()


class InferPooledSharding(EmbeddingSharding[PooledContext, KJTList, list[Tensor], Tensor]):
    """Quantized tables of bags on the devices of one process, sharded together.

    Args:
        sharding_infos: the tables in module order; ``param`` holds packed rows, uint8 ``[rows, row_bytes]`` at row
            alignment 1, or is on meta (rows then come with a state).
        env: ``ShardingEnv.from_local(world_size, 0)``.
        device: its type says what the devices are.
    """

    def __init__(
        self, sharding_infos: Sequence[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self._sharding = PooledSharding(sharding_infos, env, torch.device("cpu"))
        self.layout = self._sharding.layout

    def create_context(self, features: KeyedJaggedTensor) -> PooledContext:
        """What the output step needs of ``features``: bag lengths, where a MEAN is divided after the sum."""
        return self._sharding.create_context(features)

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[KJTList]:
        """The step that gives every device its ids."""
        return _InferFeaturesDist(self, device or self._device)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> InferGroupedPooledEmbeddingsLookup:
        """The step that looks up, holding the tables' rows where they are known.

        Args:
            device: its type says what the devices are.
            fused_params: as InferGroupedPooledEmbeddingsLookup.
            feature_processor: None.

        Raises:
            ConfigError: a feature processor: devices get the ids of whole batches with their weights.
        """
        if feature_processor is not None:
            raise ConfigError(
                f"feature_processor={type(feature_processor).__name__}: it would have to be copied to every device; process "
                "the features before they are given to the sharded module"
            )
        layout = self.layout
        lookup = InferGroupedPooledEmbeddingsLookup(
            layout.groups_per_rank, layout.world_size, fused_params, device or self._device
        )
        infos = {info.embedding_config.name: info for info in layout.infos}
        for of_rank, rects in zip(lookup.lookups, layout.rects_per_rank):
            for rect, (table, rows) in zip(rects, of_rank.pieces):
                info = infos[rect.table]
                if info.param.is_meta:
                    continue
                packed = info.param[rect.row_start : rect.row_stop]
                if rect.cols != info.embedding_config.embedding_dim:
                    packed = slice_packed_columns(
                        packed, info.embedding_config.embedding_dim, table.data_type, rect.col_start, rect.col_stop
                    )
                need = row_bytes(rect.cols, table.data_type)
                rows[:, :need].copy_(packed[:, :need])
        return lookup

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[PooledContext, list[Tensor], Tensor]:
        """The step that brings vectors to ``device`` and puts columns and row pieces together."""
        return _InferPooledDist(self, device or rank_device(self._device.type, 0))

    def embedding_dims(self) -> list[int]:
        """Columns of each output, in module order."""
        return self._sharding.embedding_dims()

    def embedding_shard_metadata(self) -> list[Any]:
        """The rectangle of each name of :meth:`embedding_names_per_rank`."""
        return self._sharding.embedding_shard_metadata()

    def embedding_names(self) -> list[str]:
        """Names of the outputs, in module order."""
        return self._sharding.embedding_names()

    def embedding_names_per_rank(self) -> list[list[str]]:
        """Names of the outputs that each rank has a part of."""
        return self._sharding.embedding_names_per_rank()

    def feature_names(self) -> list[str]:
        """The distinct features."""
        return self._sharding.feature_names()

    def feature_names_per_rank(self) -> list[list[str]]:
        """The feature of each rectangle of each rank."""
        return self._sharding.feature_names_per_rank()

    def features_per_rank(self) -> list[int]:
        """How many keys each rank receives."""
        return self._sharding.features_per_rank()


def infer_sharding(
    sharding_type: str, sharding_infos: list[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None
) -> InferPooledSharding:
    """See :func:`recinfer.distributed.quant_embeddingbag.create_infer_embedding_bag_sharding`."""
    offered = {t.value for t in ShardingType} - {ShardingType.DATA_PARALLEL.value}
    if sharding_type not in offered:
        raise ConfigError(f"sharding_type: got {sharding_type!r}; expected one of {', '.join(sorted(offered))}")
    other = {i.param_sharding.sharding_type for i in sharding_infos} - {sharding_type}
    if other:
        raise ConfigError(f"sharding_type {sharding_type!r}, but there are tables of {', '.join(sorted(other))}")
    return InferPooledSharding(sharding_infos, env, device)
