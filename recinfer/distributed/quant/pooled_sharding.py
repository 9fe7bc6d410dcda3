"""InferPooledSharding: TorchRec's interface to the sharding of quantized pooled tables over the devices of one
process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.exchange.pooled import PooledContext
from recinfer.distributed.quant.adapters import InferGroupedPooledEmbeddingsLookup
from recinfer.distributed.quant.runtime import FeaturesToDevices, PooledFromDevices
from recinfer.distributed.sharded.sharding import PooledSharding
from recinfer.distributed.types import ShardingEnv, ShardingType, rank_device
from recinfer.distributed.types.embedding_modules import BaseGroupedFeatureProcessor
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.shardings import BaseEmbeddingDist, BaseSparseFeaturesDist, EmbeddingShardingInfo
from recinfer.distributed.types.tables import ShardedEmbeddingTable
from recinfer.errors import ConfigError
from recinfer.quant.rows import slice_packed_columns

__all__ = ["InferPooledSharding", "create_infer_embedding_bag_sharding"]


class InferPooledSharding(PooledSharding):
    """Quantized tables of bags on the devices of one process, sharded together.

    Args:
        sharding_infos: the tables in module order; ``param`` holds packed rows, uint8 ``[rows, row_bytes]`` at row
            alignment 1, or is on meta (rows then come with a state).
        env: ``ShardingEnv.from_local(world_size, 0)``.
        device: its type determines the devices.
    """

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The rectangles of all devices, one device after another."""
        groups = [group for of_rank in self.layout.groups_per_rank for group in of_rank]
        return [table for group in groups for table in group.embedding_tables]

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[KJTList]:  # type: ignore[override]
        """Create the step that sends every device its ids."""
        kind = (device or self._device).type
        return FeaturesToDevices(self.layout, [rank_device(kind, rank) for rank in range(self.layout.world_size)])

    def create_lookup(  # type: ignore[override]
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> InferGroupedPooledEmbeddingsLookup:
        """Create the lookup, with the tables' rows if they are known.

        Args:
            device: its type determines the devices.
            fused_params: as InferGroupedPooledEmbeddingsLookup.
            feature_processor: None.

        Raises:
            ConfigError: a feature processor was given.
        """
        if feature_processor is not None:
            raise ConfigError(
                f"feature_processor={type(feature_processor).__name__}: not supported here; process the features "
                "before the sharded module"
            )
        layout = self.layout
        lookup = InferGroupedPooledEmbeddingsLookup(
            layout.groups_per_rank, layout.world_size, fused_params, device or self._device
        )
        infos = {info.embedding_config.name: info for info in layout.infos}
        for of_rank, rects in zip(lookup.lookups, layout.rects_per_rank):
            for rect, placed in zip(rects, of_rank.rank.tables):
                packed, dim = infos[rect.table].param, infos[rect.table].embedding_config.embedding_dim
                if not packed.is_meta:
                    rows = packed[rect.row_start : rect.row_stop]
                    piece = slice_packed_columns(rows, dim, placed.data_type, rect.col_start, rect.col_stop)
                    of_rank.rank.buffers.write(placed, piece)
        return lookup

    def create_output_dist(  # type: ignore[override]
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[PooledContext, list[Tensor], Tensor]:
        """Create the step that copies vectors to ``device`` and combines column and row pieces."""
        return PooledFromDevices(self.layout, device or rank_device(self._device.type, 0))


def create_infer_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
) -> InferPooledSharding:
    """Create the sharding of quantized pooled tables of one type over the devices of this process.

    Args:
        sharding_type: a ``ShardingType`` value except data_parallel.
        sharding_infos: the tables; ``param`` holds packed rows, uint8 ``[rows, row_bytes]``, or is on meta.
        env: ``ShardingEnv.from_local(world_size, 0)``.
        device: its type determines the devices; default CPU.

    Raises:
        ConfigError: an unsupported type, or tables of another type.
    """
    offered = {t.value for t in ShardingType} - {ShardingType.DATA_PARALLEL.value}
    if sharding_type not in offered:
        raise ConfigError(f"sharding_type: got {sharding_type!r}; expected one of {', '.join(sorted(offered))}")
    other = {i.param_sharding.sharding_type for i in sharding_infos} - {sharding_type}
    if other:
        raise ConfigError(f"sharding_type {sharding_type!r}, but there are tables of {', '.join(sorted(other))}")
    return InferPooledSharding(sharding_infos, env, device)
