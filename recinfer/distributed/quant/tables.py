"""Base of sharded quantized collections: one call over shared memory, or steps over devices; and their properties."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from recinfer.distributed.exchange.pooled import PooledContext
from recinfer.distributed.exchange.sequence import SequenceShardingContext
from recinfer.distributed.quant.place import PackedTables, check_devices, kernel_of
from recinfer.distributed.quant.runtime import (
    FeaturesToDevices,
    PackedLookup,
    PooledFromDevices,
    RowsFromDevices,
)
from recinfer.distributed.tables.slots import ShardLayout
from recinfer.distributed.types import ParameterSharding, ShardedModule, ShardingType
from recinfer.distributed.types.edges import sharding_spec
from recinfer.distributed.types.kjt_lists import KJTList, ListOfKJTList
from recinfer.distributed.types.shardings import EmbeddingShardingInfo
from recinfer.distributed.types.tables import GroupedEmbeddingConfig
from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
)
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.buffers import Placed, allocate
from recinfer.quant.lookup import PooledLookup, SequenceLookup, embedding_names
from recinfer.quant.rows import row_bytes
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen

__all__ = ["ShardedQuantTables"]

C = TypeVar("C", bound=BaseEmbeddingConfig)
Ctx = TypeVar("Ctx", PooledContext, SequenceShardingContext)


class _Steps:
    """The steps of tables that are sharded over devices; a fused lookup needs none of them."""

    def __init__(self, module: ShardedQuantTables[Any, Any], packed: PackedTables) -> None:
        check_devices(packed.devices)
        ranks = sorted(packed.devices)
        devices = [packed.devices[rank] for rank in ranks]
        pooled, weighted = module.pooled, module.weighted
        self.layout = layout = ShardLayout(module.infos(), len(ranks), is_weighted=weighted, pooled=pooled)
        self.send = FeaturesToDevices(layout, devices, want_permute=not pooled)
        by_rect = {shard.rect: shard for shard in packed.shards}
        self.lookups = []
        for groups, rects, device in zip(layout.groups_per_rank, layout.rects_per_rank, devices):
            shards = [by_rect[rect] for rect in rects]
            if packed.buffers is not None and device.type == "cpu":
                buffers, placed = packed.buffers, shards
            else:
                buffers, placed = allocate(shards, device)
                for spot, shard in zip(placed, shards):
                    buffers.write(spot, packed.rows_of(shard))
            self.lookups.append(PackedLookup(groups, placed, buffers, pooled=pooled))
        self._home: dict[torch.device, PooledFromDevices | RowsFromDevices] = {}

    def home(self, device: torch.device) -> Any:
        """The step that copies the ranks' vectors to ``device``."""
        if device not in self._home:
            kind = PooledFromDevices if self.layout.pooled else RowsFromDevices
            self._home[device] = kind(self.layout, device)
        return self._home[device]


class ShardedQuantTables(ShardedModule[ListOfKJTList, list[list[Tensor]], Any, Ctx], Generic[C, Ctx]):
    """Base of the sharded quantized collections.

    With a fused lookup, forward is a single call, and the ranks' own lookups are built on first use (``tbes_configs``,
    ``input_dist``). Without a fused lookup, the constructor builds the ranks' lookups on their devices.

    Args:
        configs: tables in module order, ``data_type`` the packed precision.
        plans: sharding of each table; empty if unknown.
        packed: positions of the rows.
        lookup: a lookup for all ranks in one call; None: each rank has its own lookup.
        output_dtype: dtype of the looked-up vectors.
        output_device: device of the outputs; None: the first rank's device.
        weighted: ids carry weights.
    """

    pooled: bool
    _fused: Any
    _steps: _Steps | None

    def __init__(
        self,
        configs: Sequence[C],
        plans: Mapping[str, ParameterSharding],
        packed: PackedTables,
        lookup: PooledLookup | SequenceLookup | None,
        output_dtype: torch.dtype,
        output_device: torch.device | None,
        *,
        weighted: bool = False,
    ) -> None:
        super().__init__()
        self._configs: list[C] = list(configs)
        self._plans = dict(plans)
        self._packed = packed
        self._output_device = torch.device(output_device or packed.devices[min(packed.devices)])
        self._output_dtype = output_dtype
        self.weighted = weighted
        self._names = embedding_names(configs)
        self._dims = [c.embedding_dim for c in configs for _ in c.feature_names]
        # Ids are checked before they are split by table, once per feature even if several tables read it.
        least: dict[str, int] = {}
        for config in configs:
            for feature in config.feature_names:
                least[feature] = min(config.num_embeddings, least.get(feature, config.num_embeddings))
        self._arranger = FeatureArranger(list(least), list(least.values()))
        # Kept out of the module tree: buffers are shared with an archive's mapping or with the unsharded module.
        self.__dict__["_fused"] = lookup
        self.__dict__["_steps"] = None if lookup is not None else _Steps(self, packed)

    def infos(self) -> list[EmbeddingShardingInfo]:
        """The tables in module order with their rectangles; rows are on meta."""
        by_table: dict[str, list[Placed]] = {}
        for shard in self._packed.shards:
            by_table.setdefault(shard.rect.table, []).append(shard)
        infos = []
        names = iter(self._names)
        for config in self._configs:
            shards = by_table[config.name]
            given = self._plans.get(config.name)
            if given is None or given.sharding_type == ShardingType.DATA_PARALLEL.value:
                given = _sharding_of(shards)  # a replicated table is read on one rank
            table = EmbeddingTableConfig(
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                name=config.name,
                data_type=config.data_type,
                feature_names=list(config.feature_names),
                pooling=getattr(config, "pooling", PoolingType.NONE),
                is_weighted=self.weighted,
                has_feature_processor=False,
                embedding_names=[next(names) for _ in config.feature_names],
            )
            shape = config.num_embeddings, row_bytes(config.embedding_dim, config.data_type)
            infos.append(EmbeddingShardingInfo(table, given, torch.empty(shape, dtype=torch.uint8, device="meta")))
        return infos

    def _built(self) -> _Steps:
        steps = self._steps
        if steps is None:
            steps = self.__dict__["_steps"] = _Steps(self, self._packed)
        return steps

    # ---------------------------------------------------------------- steps

    def input_dist(self, ctx: Ctx, features: KeyedJaggedTensor) -> ListOfKJTList:  # type: ignore[override]
        """Check ids, then split them by rank (rebased to its rows).

        Returns:
            one KJTList, of one KeyedJaggedTensor per rank.
        """
        arranged = self._arrange(features)
        self._note(ctx, arranged)
        return ListOfKJTList([self._built().send(arranged, ctx)])

    def _note(self, ctx: Ctx, arranged: KeyedJaggedTensor) -> None:
        """Record data of the input for the output step."""
        raise AssertionError("subclasses implement it")

    def _arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if self.weighted and features.weights_or_none() is None:
            raise InputError("weights are missing; this collection is weighted and needs one weight per id")
        arranged = self._arranger.arrange(features)
        self._arranger.check(arranged)
        return arranged

    def _looked_up(self, dist_input: ListOfKJTList) -> list[tuple[PackedLookup, KeyedJaggedTensor]]:
        of_ranks: KJTList = dist_input[0]
        return list(zip(self._built().lookups, of_ranks, strict=True))

    def output_dtype(self) -> torch.dtype:
        """Element type of the looked-up vectors."""
        return self._output_dtype

    def check_ids(self, features: KeyedJaggedTensor) -> None:
        """Raise for missing features and out-of-range ids.

        Raises:
            InputError: naming the feature, the sample, the id and the table's rows.
        """
        self._arrange(features)

    # ---------------------------------------------------------------- introspection

    @property
    def fused(self) -> bool:
        """Whether forward is a single call over all ranks' shards in this host's memory."""
        return self._fused is not None

    @property
    def shards(self) -> tuple[Placed, ...]:
        """Every shard that is read."""
        return self._packed.shards

    def sharding_plan(self) -> dict[str, ParameterSharding]:
        """The plan of the module, table by table; empty if the module was built from packed shards."""
        return dict(self._plans)

    @property
    def shardings(self) -> dict[str, list[str]]:
        """Sharding type -> its tables."""
        types: dict[str, list[str]] = {}
        for table, plan in self._plans.items():
            types.setdefault(plan.sharding_type, []).append(table)
        return types

    def sharding_type_to_sharding_infos(self) -> dict[str, list[EmbeddingShardingInfo]]:
        """Sharding type -> infos of its tables, rows on meta.

        Empty for a module built from packed shards, which has rectangles and no plan.
        """
        found: dict[str, list[EmbeddingShardingInfo]] = {}
        for info in self.infos():
            plan = self._plans.get(info.embedding_config.name)
            if plan is not None:
                info.param_sharding = plan
                found.setdefault(plan.sharding_type, []).append(info)
        return found

    def copy(self, device: torch.device) -> Self:
        """A copy with outputs on ``device``. On the same kind of device rows are shared, not copied.

        Raises:
            ConfigError: another kind of device, for a module that was not built from packed shards: shard the quantized
                module for that device instead.
        """
        device = torch.device(device)
        if device.type != self._output_device.type:
            raise ConfigError(
                f"copy to {device}: this module's ranks are on "
                f"{sorted({str(d) for d in self._packed.devices.values()})}; shard the quantized module with a plan "
                f"for {device.type}, or load the archive with device='{device.type}'"
            )
        other = copy.copy(self)
        other.__dict__.update({"_modules": dict(self._modules), "_buffers": dict(self._buffers)})
        other._output_device = device
        return other

    def tbes_configs(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """Every rank's TBE modules and the shards that each looks up, for registration."""
        lookups = self._built().lookups
        return {group.batch.fbgemm_module(): group.config for lookup in lookups for group in lookup.kernels}

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """:meth:`tbes_configs` under the name that TorchRec's registration uses."""
        return self.tbes_configs()


def _sharding_of(shards: Sequence[Placed]) -> ParameterSharding:
    """A table's rectangles as ParameterSharding, always grid_shard, which includes the other types."""
    rects = [shard.rect for shard in shards]
    return ParameterSharding(
        ShardingType.GRID_SHARD.value,
        kernel_of(shards[0].memory).value,
        [rect.rank for rect in rects],
        sharding_spec(rects, [f"rank:{rect.rank}/cpu" for rect in rects]),
    )
