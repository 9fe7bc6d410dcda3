"""What sharded quantized collections share: the fused call, the ranks, what they say of themselves, the registered TBEs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from recinfer.distributed.embedding_sharding import EmbeddingShardingInfo
from recinfer.distributed.embedding_types import GroupedEmbeddingConfig, KJTList, ListOfKJTList, ShardedEmbeddingTable
from recinfer.distributed.quant_buffers import place_shards
from recinfer.distributed.quant_layout import PackedShard, RankInput, RankLayout, check_devices
from recinfer.distributed.quant_placement import Placed, kernel_of
from recinfer.distributed.types import NullShardedModuleContext, ParameterSharding, ShardedModule
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingTableConfig, PoolingType
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.collection import row_alignment_for
from recinfer.quant.lookup import PooledLookup, SequenceLookup, embedding_names
from recinfer.quant.rows import row_bytes
from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["ShardedQuantState"]

C = TypeVar("C", bound=BaseEmbeddingConfig)


class ShardedQuantState(Generic[C], ShardedModule[ListOfKJTList, list[list[Tensor]], Any, NullShardedModuleContext]):
    """Base of the sharded quantized collections.

    With a fused lookup, forward is that one call; the ranks' own lookups are built when someone asks for them
    (``tbes_configs``, ``input_dist``). Without one they are built here, on their devices.
    """

    _pooled: bool
    _lookup_type: type[PooledLookup] | type[SequenceLookup]
    _fused: PooledLookup | SequenceLookup | None
    _layouts: list[RankLayout] | None

    def _setup(
        self,
        configs: Sequence[C],
        plans: Mapping[str, ParameterSharding],
        placed: Placed,
        output_dtype: torch.dtype,
        output_device: torch.device | None,
        **lookup_options: bool,
    ) -> None:
        """What a constructor does, whatever the tables come from.

        Args:
            configs: tables in module order, ``data_type`` the packed precision.
            plans: sharding of each table, for introspection; may be empty.
            placed: where the rows are.
            output_dtype: of the looked-up vectors.
            output_device: where outputs are wanted; None: the first rank's device.
            lookup_options: what this kind of lookup wants besides.
        """
        super().__init__()
        self._configs: list[C] = list(configs)
        self._plans = dict(plans)
        self._source = placed.source
        self._devices = dict(placed.devices)
        self._output_device = torch.device(output_device or self._devices[min(self._devices)])
        self._output_dtype = output_dtype
        self._names = embedding_names(configs)
        self._dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        self._arranger = FeatureArranger.of_tables(configs)
        lookup = None
        if placed.pieces is not None:
            lookup = self._lookup_type(
                configs,  # type: ignore[arg-type]  # each collection's lookup takes its own configs
                placed.pieces,
                placed.buffer,
                row_alignment=placed.row_alignment,
                output_dtype=output_dtype,
                managed=placed.managed,
                **lookup_options,
            )
        # Kept out of the module tree: buffers are shared with an archive's mapping or with the unsharded module.
        self.__dict__["_fused"] = lookup
        self.__dict__["_layouts"] = None
        if lookup is None:
            self._build_ranks()

    # ---------------------------------------------------------------- ranks

    def _build_ranks(self) -> list[RankLayout]:
        if self._layouts is not None:
            return self._layouts
        ranks = sorted(self._devices)
        check_devices(ranks, self._devices)
        layouts = []
        for rank in ranks:
            device = self._devices[rank]
            mine: Sequence[PackedShard] = [s for s in self._source.shards if s.rank == rank]
            alignment = row_alignment_for(device)
            managed = None
            if self._source.buffer is not None and device.type == "cpu":
                buffer = self._source.buffer
            else:
                buffer, managed, mine = place_shards(self._configs, mine, self._source.rows_of, device, alignment)
            layouts.append(
                RankLayout(self._configs, mine, buffer, pooled=self._pooled, row_alignment=alignment, managed=managed)
            )
        self.__dict__["_layouts"] = layouts
        return layouts

    def create_context(self) -> NullShardedModuleContext:
        """Nothing is carried between the steps."""
        return NullShardedModuleContext()

    def input_dist(self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor) -> ListOfKJTList:  # type: ignore[override]
        """Check and arrange ids, then give every rank its own (rebased to its rows).

        Returns:
            one KJTList per rank that holds shards. Row shards keep only their ids; their positions stay with this
            module's context.
        """
        arranged = self._arrange(features)
        inputs = [layout.dist(arranged) for layout in self._build_ranks()]
        ctx.arranged = arranged  # type: ignore[attr-defined]
        ctx.inputs = inputs  # type: ignore[attr-defined]
        return ListOfKJTList([KJTList([i.features] if i is not None else []) for i in inputs])

    def _rank_inputs(self, ctx: Any, dist_input: ListOfKJTList) -> list[RankInput | None]:
        """The context's inputs with the features that the caller hands on (it may have moved or replaced them)."""
        return [
            None if known is None else RankInput(given[0], known.positions)
            for known, given in zip(ctx.inputs, dist_input, strict=True)
        ]

    def _arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        arranged = self._arranger.arrange(features)
        self._arranger.check(arranged)
        return arranged

    def output_dtype(self) -> torch.dtype:
        """Element type of the looked-up vectors."""
        return self._output_dtype

    def check_ids(self, features: KeyedJaggedTensor) -> None:
        """Refuse missing features and out-of-range ids.

        Raises:
            InputError: naming the feature, the sample, the id and the table's rows.
        """
        self._arrange(features)

    # ---------------------------------------------------------------- introspection

    @property
    def fused(self) -> bool:
        """Whether forward is one call over all ranks' shards in this host's memory."""
        return self._fused is not None

    @property
    def fused_lookup(self) -> PooledLookup | SequenceLookup | None:
        """That one call, a PooledLookup or a SequenceLookup, for those who bring features in its order already."""
        return self._fused

    @property
    def shards(self) -> tuple[PackedShard, ...]:
        """Every shard of every rank."""
        return self._source.shards

    def sharding_plan(self) -> dict[str, ParameterSharding]:
        """The plan it was built with, table by table (empty when built from packed shards)."""
        return dict(self._plans)

    @property
    def shardings(self) -> dict[str, list[str]]:
        """Sharding type -> the tables sharded so."""
        types: dict[str, list[str]] = {}
        for table, plan in self._plans.items():
            types.setdefault(plan.sharding_type, []).append(table)
        return types

    def sharding_type_to_sharding_infos(self) -> dict[str, list[EmbeddingShardingInfo]]:
        """Sharding type -> the tables sharded so, with their packed rows where they are whole in memory (else on meta).

        Empty for a module built from packed shards, which has rectangles and no plan.
        """
        infos: dict[str, list[EmbeddingShardingInfo]] = {}
        for config in self._configs:
            if config.name not in self._plans:
                continue
            rows, width = config.num_embeddings, row_bytes(config.embedding_dim, config.data_type)
            table = EmbeddingTableConfig(
                num_embeddings=rows,
                embedding_dim=config.embedding_dim,
                name=config.name,
                data_type=config.data_type,
                feature_names=list(config.feature_names),
                pooling=getattr(config, "pooling", PoolingType.NONE),
                is_weighted=bool(getattr(self, "_is_weighted", False)),
                has_feature_processor=False,
                embedding_names=list(config.feature_names),
            )
            plan = self._plans[config.name]
            info = EmbeddingShardingInfo(table, plan, torch.empty((rows, width), dtype=torch.uint8, device="meta"))
            infos.setdefault(plan.sharding_type, []).append(info)
        return infos

    def copy(self, device: torch.device) -> Self:
        """The same module for outputs on ``device``. On the same kind of device rows are shared, not copied.

        Raises:
            ConfigError: another kind of device, for a module that was not built from packed shards: shard the quantized
                module for that device instead.
        """
        device = torch.device(device)
        if device.type != self._output_device.type:
            raise ConfigError(
                f"copy to {device}: this module's ranks are on {sorted({str(d) for d in self._devices.values()})}; "
                f"shard the quantized module with a plan for {device.type}, or load the archive with device='{device.type}'"
            )
        other = copy.copy(self)
        other.__dict__.update({"_modules": dict(self._modules), "_buffers": dict(self._buffers)})
        other._output_device = device
        return other

    def tbes_configs(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """Every rank's TBE modules and the shards that each looks up, for registration.

        Tables of one TBE have one precision and one compute kernel. The exception: where a GPU caches rows, one TBE keeps
        that cache for all tables of its call, whatever their precision; ``embedding_tables`` have each table's own.
        """
        configs = {c.name: c for c in self._configs}
        result = {}
        for layout in self._build_ranks():
            for batch, shards in zip(layout.batches, layout.batch_shards):
                alike: dict[Any, list[int]] = {}
                for number, shard in enumerate(shards):
                    kind = None if batch.is_cached else (configs[shard.table].data_type, shard.memory)
                    alike.setdefault(kind, []).append(number)
                for numbers in alike.values():
                    tables = [_sharded_table(configs[shards[i].table], shards[i]) for i in numbers]
                    result[batch.fbgemm_module(numbers)] = GroupedEmbeddingConfig(
                        data_type=tables[0].data_type,
                        pooling=batch.pooling,
                        is_weighted=bool(getattr(self, "_is_weighted", False)),
                        has_feature_processor=False,
                        compute_kernel=tables[0].compute_kernel,
                        embedding_tables=tables,
                    )
        return result

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """The same as :meth:`tbes_configs`; the name that TorchRec's registration looks for."""
        return self.tbes_configs()


def _sharded_table(config: BaseEmbeddingConfig, shard: PackedShard) -> ShardedEmbeddingTable:
    return ShardedEmbeddingTable(
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        name=config.name,
        data_type=config.data_type,
        feature_names=list(config.feature_names),
        pooling=getattr(config, "pooling", PoolingType.NONE),
        local_rows=shard.rows,
        local_cols=shard.cols,
        compute_kernel=kernel_of(shard.memory),
        embedding_names=list(config.feature_names),
    )
