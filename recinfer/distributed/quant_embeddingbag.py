"""Sharded quantized EmbeddingBagCollection over the ranks of one process, and its sharder.

Differs from TorchRec's on purpose: it holds its weights when it is built, outputs keep the module's feature order, MEAN
divides by the full bag, every precision shards, and on one CPU host all ranks are one op call over shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.embedding_types import BaseQuantEmbeddingSharder, ListOfKJTList
from recinfer.distributed.quant_layout import PackedShard, fused_pieces, mean_columns
from recinfer.distributed.quant_state import (
    PackedSource,
    ShardedQuantState,
    rank_devices,
    shards_of_plan,
    source_of_buffer,
    source_of_module,
    table_plans,
)
from recinfer.distributed.types import NullShardedModuleContext, ParameterSharding, ShardingEnv
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.lookup import ColumnPiece, PooledLookup, embedding_names
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["QuantEmbeddingBagCollectionSharder", "ShardedQuantEmbeddingBagCollection"]


class ShardedQuantEmbeddingBagCollection(ShardedQuantState[EmbeddingBagConfig]):
    """A quantized EmbeddingBagCollection whose tables are cut over the ranks of one process.

    Args:
        module: the quantized collection (its packed rows are shared or copied, never changed).
        table_name_to_parameter_sharding: the plan of every table.
        env: ``ShardingEnv.from_local(world_size, 0)``.
        fused_params: accepted for compatibility.
        device: where outputs are wanted; default CPU when every rank is, else rank 0's device.
        fused: None: one call over shared memory when all ranks are on CPU; False: run the documented steps
            (input_dist, compute, output_dist) even then.

    ``forward(features: KeyedJaggedTensor) -> KeyedTensor``, keys in module order, values [B, sum of dims]. Table- and
    column-wise results equal the unsharded module's bit for bit, row-wise to the rounding of the sum.

    Raises:
        ConfigError: a table has no plan, shards do not tile it, or a device is not there.
    """

    _pooled = True

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        configs = module.embedding_bag_configs()
        plans = table_plans(configs, table_name_to_parameter_sharding, env)
        devices = rank_devices(table_name_to_parameter_sharding, env)
        source = source_of_module(module, shards_of_plan(plans))
        pieces = None
        if fused is not False and all(d.type in ("cpu", "meta") for d in [*devices.values(), module.device]):
            # Whole rows stay where the unsharded module has them: the ranks of one host share memory.
            pieces = {c.name: (ColumnPiece(0, c.embedding_dim, module.table_offsets[c.name]),) for c in configs}
        self._setup(
            configs,
            table_name_to_parameter_sharding,
            source,
            pieces,
            module.buffer,
            module.row_alignment,
            module.is_weighted(),
            module.output_dtype(),
            devices,
            device,
        )

    def _setup(
        self,
        configs: Sequence[EmbeddingBagConfig],
        params: Mapping[str, ParameterSharding],
        source: PackedSource,
        pieces: Mapping[str, Sequence[ColumnPiece]] | None,
        buffer: Tensor,
        row_alignment: int,
        is_weighted: bool,
        output_dtype: torch.dtype,
        devices: Mapping[int, torch.device],
        device: torch.device | None,
    ) -> None:
        lookup = None
        if pieces is not None:
            lookup = PooledLookup(
                configs,
                pieces,
                buffer,
                is_weighted=is_weighted,
                row_alignment=row_alignment,
                output_dtype=output_dtype,
            )
        target = torch.device(device) if device is not None else devices[min(devices)]
        super().__init__(configs, params, source, lookup, devices, target)
        self._is_weighted = is_weighted
        self._output_dtype = output_dtype
        self._names = embedding_names(configs)
        self._dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        self._mean = mean_columns(configs)
        self._arranger = FeatureArranger.of_tables(configs)

    @classmethod
    def from_packed(
        cls,
        tables: Sequence[EmbeddingBagConfig],
        shards: Sequence[PackedShard],
        buffer: Tensor,
        *,
        is_weighted: bool = False,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        output_dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
    ) -> ShardedQuantEmbeddingBagCollection:
        """Build it over packed shards that lie in ``buffer`` (an archive's mapping), with no copy on CPU.

        Args:
            tables: configs in module order, ``data_type`` the packed precision.
            shards: every rank's shards, offsets into ``buffer`` (row alignment 1).
            buffer: uint8, 1-D, on CPU. Kept and read, never written.
            device: ``"cpu"``, or ``"cuda"``: rank r's rows are copied to ``cuda:r``.
        """
        source = source_of_buffer(tables, shards, buffer)
        kind = torch.device(device).type
        devices = {r: torch.device("cpu") if kind == "cpu" else torch.device(kind, r) for r in range(world_size)}
        pieces = fused_pieces(tables, shards) if kind == "cpu" and fused is not False else None
        self = cls.__new__(cls)
        self._setup(tables, {}, source, pieces, buffer, 1, is_weighted, output_dtype, devices, None)
        return self

    def _arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        arranged = self._arranger.arrange(features)
        self._arranger.check(arranged)
        if self._is_weighted and arranged.weights_or_none() is None:
            raise InputError("weights are missing; this collection is weighted and needs one weight per id")
        return arranged

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:  # type: ignore[override]
        """Pooled vectors of every feature."""
        if self._fused is not None:
            return self._fused.forward(features)
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))

    def compute(self, ctx: NullShardedModuleContext, dist_input: ListOfKJTList) -> list[list[Tensor]]:
        """Each rank's sums, on its device: [B, its real columns]."""
        return [
            [] if given is None else [layout.pooled(given, self._is_weighted)]
            for layout, given in zip(self._build_ranks(), self._rank_inputs(ctx, dist_input))
        ]

    def output_dist(self, ctx: NullShardedModuleContext, output: list[list[Tensor]]) -> KeyedTensor:  # type: ignore[override]
        """Bring the ranks' outputs to one device: place columns, add row pieces, divide MEAN by the full bag."""
        arranged: KeyedJaggedTensor = ctx.arranged  # type: ignore[attr-defined]
        batch = arranged.stride()
        out_BD = torch.zeros((batch, sum(self._dims)), device=self._output_device)
        for layout, parts in zip(self._build_ranks(), output):
            for part in parts:
                out_BD.index_add_(1, layout.columns.to(self._output_device), part.to(self._output_device))
        if self._mean and batch:
            lengths_FB = arranged.lengths().view(-1, batch).to(self._output_device)
            for feature, start, stop in self._mean:
                out_BD[:, start:stop] *= (1.0 / lengths_FB[feature].clamp(min=1).float()).unsqueeze(1)
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=out_BD.to(self._output_dtype))

    def compute_and_output_dist(self, ctx: NullShardedModuleContext, input: ListOfKJTList) -> KeyedTensor:  # type: ignore[override]
        """Both steps."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    def output_dtype(self) -> torch.dtype:
        """Element type of the looked-up vectors."""
        return self._output_dtype


class QuantEmbeddingBagCollectionSharder(BaseQuantEmbeddingSharder[EmbeddingBagCollection]):
    """Shards :class:`recinfer.quant.embedding_modules.EmbeddingBagCollection` by a plan."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantEmbeddingBagCollection:
        """The sharded module, holding its weights."""
        return ShardedQuantEmbeddingBagCollection(module, params, env, self.fused_params, device)

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """What it shards."""
        return EmbeddingBagCollection
