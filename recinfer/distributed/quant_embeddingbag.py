"""Sharded quantized EmbeddingBagCollection over the ranks of one process, and its sharder.

Differs from TorchRec's on purpose: it holds its weights when it is built, outputs keep the module's feature order, MEAN
divides by the full bag, every precision shards, and on one CPU host all ranks are one op call over shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from recinfer.distributed.embedding_types import BaseQuantEmbeddingSharder, KJTList, ListOfKJTList
from recinfer.distributed.fused_params import check_output_dtype
from recinfer.distributed.quant_layout import PackedShard, mean_columns
from recinfer.distributed.quant_placement import Placed, place_buffer, place_module
from recinfer.distributed.quant_state import ShardedQuantState
from recinfer.distributed.sharding.typed_sharder import TypedSharder
from recinfer.distributed.types import NullShardedModuleContext, ParameterSharding, ShardingEnv
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.lookup import PooledLookup
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingBagCollectionSharder",
    "ShardedQuantEmbeddingBagCollection",
    "create_infer_embedding_bag_sharding",
]

QuantEmbeddingBagCollection = EmbeddingBagCollection


def create_infer_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
) -> EmbeddingSharding[Any, KJTList, list[Tensor], Tensor]:
    """The sharding of quantized pooled tables of one type over the devices of this process.

    Args:
        sharding_type: a ``ShardingType`` value, but for data_parallel.
        sharding_infos: the tables; ``param`` holds packed rows, uint8 ``[rows, row_bytes]``, or is on meta.
        env: ``ShardingEnv.from_local(world_size, 0)``.
        device: its type says what the devices are; default CPU.

    Raises:
        ConfigError: a type that is not offered, or tables of another one.
    """
    from recinfer.distributed.infer_sharding import infer_sharding  # what training shares is imported when it is used

    return infer_sharding(sharding_type, sharding_infos, env, device)


class ShardedQuantEmbeddingBagCollection(ShardedQuantState[EmbeddingBagConfig]):
    """A quantized EmbeddingBagCollection whose tables are cut over the ranks of one process.

    Args:
        module: the quantized collection (its packed rows are shared or copied, never changed).
        table_name_to_parameter_sharding: the plan of every table.
        env: ``ShardingEnv.from_local(world_size, 0)``.
        fused_params: ``output_dtype``, if given, has to be the module's; other keys (registration, caches, the form of the
            state) are accepted for compatibility.
        device: where outputs are wanted; default CPU when every rank is, else rank 0's device.
        fused: None: one call over shared memory when all ranks are on CPU; False: run the documented steps
            (input_dist, compute, output_dist) even then.

    ``forward(features: KeyedJaggedTensor) -> KeyedTensor``, keys in module order, values [B, sum of dims]. Table- and
    column-wise results equal the unsharded module's bit for bit, row-wise to the rounding of the sum.

    Raises:
        ConfigError: a table has no plan, shards do not tile it, or a device is not there.
    """

    _pooled = True
    _lookup_type = PooledLookup
    _fused: PooledLookup | None

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
        check_output_dtype(fused_params, module.output_dtype())
        params = table_name_to_parameter_sharding
        placed = place_module(module, params, env, fused=fused)
        self._set_pooled(
            module.embedding_bag_configs(), params, placed, module.output_dtype(), device, module.is_weighted()
        )

    def _set_pooled(
        self,
        configs: Sequence[EmbeddingBagConfig],
        params: Mapping[str, ParameterSharding],
        placed: Placed,
        output_dtype: torch.dtype,
        device: torch.device | None,
        is_weighted: bool,
    ) -> None:
        self._setup(configs, params, placed, output_dtype, device, is_weighted=is_weighted)
        self._is_weighted = is_weighted
        self._mean = mean_columns(configs)

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
        kernels: Mapping[str, str] | None = None,
        join_columns: bool = False,
    ) -> ShardedQuantEmbeddingBagCollection:
        """Build it over packed shards that lie in ``buffer`` (an archive's mapping), with no copy on CPU.

        Args:
            tables: configs in module order, ``data_type`` the packed precision.
            shards: every rank's shards, offsets into ``buffer`` (row alignment 1).
            buffer: uint8, 1-D, on CPU. Kept and read, never written.
            device: ``"cpu"``, or ``"cuda"``: rank r's rows are copied to ``cuda:r``.
            kernels: table -> compute kernel of its plan: on CUDA ``quant_uvm`` rows stay in host memory, those of
                ``quant_uvm_caching`` behind a cache on the GPU.
            join_columns: on CPU, put tables that are cut by columns together again, in memory of this process: such a
                table is then looked up as fast as one that is not cut.
        """
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
        self._set_pooled(tables, {}, placed, output_dtype, None, is_weighted)
        return self

    def _arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if self._is_weighted and features.weights_or_none() is None:
            raise InputError("weights are missing; this collection is weighted and needs one weight per id")
        return super()._arrange(features)

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


class QuantEmbeddingBagCollectionSharder(
    BaseQuantEmbeddingSharder[EmbeddingBagCollection],
    TypedSharder[EmbeddingBagCollection, ShardedQuantEmbeddingBagCollection],
):
    """Shards :class:`recinfer.quant.embedding_modules.EmbeddingBagCollection` by a plan."""

    _takes, _makes = EmbeddingBagCollection, ShardedQuantEmbeddingBagCollection
