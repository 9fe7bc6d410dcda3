"""Sharded quantized EmbeddingCollection (unpooled) over the ranks of one process, and its sharder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.embedding_types import BaseQuantEmbeddingSharder, ListOfKJTList
from recinfer.distributed.fused_params import check_output_dtype
from recinfer.distributed.quant_layout import PackedShard
from recinfer.distributed.quant_placement import place_buffer, place_module
from recinfer.distributed.quant_state import ShardedQuantState
from recinfer.distributed.sharding.typed_sharder import TypedSharder
from recinfer.distributed.types import NullShardedModuleContext, ParameterSharding, ShardingEnv
from recinfer.modules.embedding_configs import EmbeddingConfig
from recinfer.quant.embedding_modules import EmbeddingCollection
from recinfer.quant.lookup import SequenceLookup
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = ["QuantEmbeddingCollection", "QuantEmbeddingCollectionSharder", "ShardedQuantEmbeddingCollection"]

QuantEmbeddingCollection = EmbeddingCollection


class ShardedQuantEmbeddingCollection(ShardedQuantState[EmbeddingConfig]):
    """A quantized EmbeddingCollection whose tables are cut over the ranks of one process.

    Args as :class:`recinfer.distributed.quant_embeddingbag.ShardedQuantEmbeddingBagCollection`.
    ``forward(features) -> dict[str, JaggedTensor]`` in module order, equal bit for bit to the unsharded module.
    """

    _pooled = False
    _lookup_type = SequenceLookup
    _fused: SequenceLookup | None

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        check_output_dtype(fused_params, module.output_dtype())
        params, need_indices = table_name_to_parameter_sharding, module.need_indices()
        placed = place_module(module, params, env, fused=fused)
        configs = module.embedding_configs()
        self._setup(configs, params, placed, module.output_dtype(), device, need_indices=need_indices)
        self._need_indices = need_indices

    @classmethod
    def from_packed(
        cls,
        tables: Sequence[EmbeddingConfig],
        shards: Sequence[PackedShard],
        buffer: Tensor,
        *,
        need_indices: bool = False,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        output_dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
        kernels: Mapping[str, str] | None = None,
        join_columns: bool = False,
    ) -> ShardedQuantEmbeddingCollection:
        """As :meth:`recinfer.distributed.quant_embeddingbag.ShardedQuantEmbeddingBagCollection.from_packed`."""
        placed = place_buffer(
            tables,
            shards,
            buffer,
            world_size=world_size,
            device=device,
            fused=fused,
            kernels=kernels,
            join_columns=join_columns,
        )
        self = cls.__new__(cls)
        self._setup(tables, {}, placed, output_dtype, None, need_indices=need_indices)
        self._need_indices = need_indices
        return self

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:  # type: ignore[override]
        """One vector per id of every feature."""
        if self._fused is not None:
            return self._fused.forward(features)
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))

    def compute(self, ctx: NullShardedModuleContext, dist_input: ListOfKJTList) -> list[list[Tensor]]:
        """Each rank's rows, on its device: one tensor per (feature, shard) pair."""
        return [
            [] if given is None else layout.sequences(given)
            for layout, given in zip(self._build_ranks(), self._rank_inputs(ctx, dist_input))
        ]

    def output_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, output: list[list[Tensor]]
    ) -> dict[str, JaggedTensor]:
        """Put every piece where its ids and columns stand."""
        arranged: KeyedJaggedTensor = ctx.arranged  # type: ignore[attr-defined]
        edges = arranged.offset_per_key()
        device = self._output_device
        rows = [
            torch.zeros((edges[i + 1] - edges[i], dim), device=device, dtype=self._output_dtype)
            for i, dim in enumerate(self._dims)
        ]
        for layout, rank_input, parts in zip(self._build_ranks(), ctx.inputs, output):  # type: ignore[attr-defined]
            if rank_input is None:
                continue
            kept = rank_input.features.offset_per_key()
            expanded = 0  # where this pair's ids start among the rank's expanded ids
            for pair, part in enumerate(parts):
                feature, shard = layout.order[pair], layout.shards[pair]
                target = rows[feature][:, shard.col_start : shard.col_stop]
                values = part.to(device=device, dtype=self._output_dtype)
                if rank_input.positions is None:
                    target.copy_(values)
                else:
                    at = rank_input.positions[kept[pair] : kept[pair + 1]].to(device) - expanded
                    target.index_copy_(0, at, values)
                expanded += edges[feature + 1] - edges[feature]
        lengths_FB = arranged.lengths().view(len(self._dims), -1).to(device)
        ids = arranged.values().to(device)
        return {
            name: JaggedTensor(
                values=rows[i],
                lengths=lengths_FB[i],
                weights=ids[edges[i] : edges[i + 1]] if self._need_indices else None,
            )
            for i, name in enumerate(self._names)
        }

    def compute_and_output_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, input: ListOfKJTList
    ) -> dict[str, JaggedTensor]:
        """Both steps."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self._need_indices


class QuantEmbeddingCollectionSharder(
    BaseQuantEmbeddingSharder[EmbeddingCollection], TypedSharder[EmbeddingCollection, ShardedQuantEmbeddingCollection]
):
    """Shards :class:`recinfer.quant.embedding_modules.EmbeddingCollection` by a plan."""

    _takes, _makes = EmbeddingCollection, ShardedQuantEmbeddingCollection
