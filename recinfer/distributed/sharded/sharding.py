"""Shardings of tables: layout, input exchange, lookup and output exchange, with TorchRec's interface.

One class runs every sharding type, because the types differ only in their rectangles. The modules of `sharding` define
TorchRec's class for each type.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.exchange.features import ShardFeaturesDist
from recinfer.distributed.exchange.inside_hosts import HostPooledDist, summed_inside_hosts
from recinfer.distributed.exchange.pooled import PooledContext, ShardPooledDist
from recinfer.distributed.exchange.sequence import SequenceShardingContext, ShardSequenceDist
from recinfer.distributed.sharded.kernel_settings import merge_fused_params
from recinfer.distributed.tables.slots import ShardLayout, check_kind
from recinfer.distributed.tables.values import fill, new_seed
from recinfer.distributed.types import CommOp, QuantizedCommCodecs, ShardingEnv, ShardingType
from recinfer.distributed.types.embedding_modules import BaseEmbeddingLookup, BaseGroupedFeatureProcessor
from recinfer.distributed.types.sharding_types import types_where
from recinfer.distributed.types.shardings import (
    BaseEmbeddingDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from recinfer.distributed.types.tables import GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import PoolingType
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata

__all__ = ["HOST_TYPES", "ROW_TYPES", "PooledSharding", "SequenceSharding", "TableSharding"]

# Types whose vectors are summed over ranks; TorchRec uses a reduce-scatter.
ROW_TYPES = set(types_where(lambda rule: rule.cuts_rows))
HOST_TYPES = set(types_where(lambda rule: rule.sums_inside_hosts))


class TableSharding(EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Any]):
    """A set of tables of a module that are sharded together.

    Args:
        sharding_infos: the tables in module order, of any types but data_parallel, or all data_parallel.
        env: the ranks.
        device: device of rows and buffers.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.

    Raises:
        ConfigError: tables of another type than :attr:`kind`, or shards that do not tile their table.
    """

    kind: ClassVar[ShardingType | None] = None  # None: a mix
    pooled: ClassVar[bool]

    def __init__(
        self,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        if self.kind is not None:
            check_kind(sharding_infos, self.kind)
        self._env = env
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        kinds = {info.param_sharding.sharding_type for info in sharding_infos}
        self.replicated = kinds == {ShardingType.DATA_PARALLEL.value}
        self.layout = ShardLayout(
            sharding_infos,
            env.world_size,
            is_weighted=any(info.embedding_config.is_weighted for info in sharding_infos),
            pooled=self.pooled,
            replicated=self.replicated,
        )
        self._rank = 0 if self.replicated else env.rank
        self._exchange_pg = None if self.replicated else env.process_group

    def _groups(self, fused_params: dict[str, Any] | None, processed: bool = False) -> list[GroupedEmbeddingConfig]:
        """This rank's groups. ``fused_params`` are defaults for the tables' own; a processor makes the groups
        weighted."""
        groups = self.layout.groups_per_rank[self._rank]
        if not fused_params and not processed:
            return groups
        return [
            replace(
                group,
                embedding_tables=[self._with(table, fused_params, processed) for table in group.embedding_tables],
                fused_params=merge_fused_params(fused_params, group.fused_params),
                is_weighted=group.is_weighted or processed,
                has_feature_processor=processed,
            )
            for group in groups
        ]

    @staticmethod
    def _with(
        table: ShardedEmbeddingTable, fused_params: dict[str, Any] | None, processed: bool
    ) -> ShardedEmbeddingTable:
        return replace(
            table,
            fused_params=merge_fused_params(fused_params, table.fused_params),
            is_weighted=table.is_weighted or processed,
            has_feature_processor=processed,
        )

    @abc.abstractmethod
    def create_context(self, features: KeyedJaggedTensor) -> EmbeddingShardingContext:
        """The context of one forward on ``features``."""

    def local_rects(self) -> list[Rect]:
        """This rank's rectangles, in the order of :meth:`embedding_tables`."""
        return self.layout.rects_per_rank[self._rank]

    def fill(self, lookup: Any) -> None:
        """Give the rows of ``lookup``, one of :meth:`create_lookup`, their first values.

        The tables' given values are used once and then released; later calls initialise. Replicas get rank 0's values:
        all ranks must call this.
        """
        seed = new_seed()
        numbers = {name: number for number, name in enumerate(self.layout.tilings)}
        for rect, (_, parameter) in zip(self.local_rects(), lookup.named_parameters_by_table()):
            number = numbers[rect.table]
            fill(parameter.detach(), self.layout.infos[number], rect, seed + (number << 32))
            if self.replicated and self._env.process_group is not None and not parameter.is_meta:
                source = dist.get_global_rank(self._env.process_group, 0)
                dist.broadcast(parameter.detach(), source, group=self._env.process_group)
        for info in self.layout.infos:
            info.param = torch.empty_like(info.param, device="meta")

    def _codecs(self, op: CommOp) -> QuantizedCommCodecs | None:
        return (self.qcomm_codecs_registry or {}).get(op.name)

    def create_input_dist(self, device: torch.device | None = None, send_weights: bool = True) -> ShardFeaturesDist:
        """Create the input exchange; it sends weights if the tables need them and ``send_weights`` is set."""
        return ShardFeaturesDist(
            self.layout,
            self._exchange_pg,
            want_permute=not self.pooled,
            send_weights=send_weights,
        )

    def embedding_dims(self) -> list[int]:
        """Columns of each output, in module order."""
        return [columns for _, columns, _ in self.layout.outputs]

    def embedding_names(self) -> list[str]:
        """Names of the outputs, in module order."""
        return [name for name, _, _ in self.layout.outputs]

    def embedding_names_per_rank(self) -> list[list[str]]:
        """Names of the outputs that each rank has a part of, one for each rectangle and feature."""
        return self._per_rank([slot.name for slot in self.layout.slots])

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """The rectangle of each name of :meth:`embedding_names_per_rank`, rank after rank; None for replicas."""
        return [self.layout.tilings[slot.rect.table].shards.get(slot.rect) for slot in self.layout.slots]

    def feature_names(self) -> list[str]:
        """The distinct features."""
        return list(self.layout.features)

    def feature_names_per_rank(self) -> list[list[str]]:
        """The feature of each rectangle of each rank."""
        return self._per_rank([slot.feature for slot in self.layout.slots])

    def features_per_rank(self) -> list[int]:
        """How many keys each rank receives."""
        return list(self.layout.slots_per_rank)

    def _per_rank(self, items: list[str]) -> list[list[str]]:
        at, result = 0, []
        for count in self.layout.slots_per_rank:
            result.append(items[at : at + count])
            at += count
        return result

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards on this rank."""
        return [table for group in self.layout.groups_per_rank[self._rank] for table in group.embedding_tables]


class PooledSharding(TableSharding):
    """Tables of bags, sharded together."""

    pooled = True

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Create the lookup of this rank's shards.

        Args:
            device: device of the rows.
            fused_params: settings of the fused kernels; the settings of a table's own info take precedence.
            feature_processor: computes the weights of the received ids, as GroupedPositionWeightedModule does.

        Raises:
            ConfigError: a feature processor for bags that are not whole on one rank, or whose mean it would change.
        """
        if feature_processor is not None:
            self._check_processable()
        # Imported late: planning needs no FBGEMM.
        from recinfer.distributed.tables.lookups import GroupedPooledEmbeddingsLookup

        lookup = GroupedPooledEmbeddingsLookup(
            grouped_configs=self._groups(fused_params, feature_processor is not None),
            device=device or self._device,
            pg=self._env.process_group,
            feature_processor=feature_processor,
            scale_weight_gradients=False,  # done in the backward of recinfer.distributed.exchange.weights
            sharding_type=ShardingType.DATA_PARALLEL if self.replicated else None,
            env=self._env,
        )
        self.fill(lookup)
        return lookup

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[PooledContext, Tensor, Tensor]:
        """Create the output exchange of pooled vectors."""
        device = device or self._device
        summed = {info.param_sharding.sharding_type for info in self.layout.infos} <= ROW_TYPES
        inside = self._codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
        between = self._codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL)
        if self._exchange_pg is not None and self._inside_hosts():
            return HostPooledDist(self.layout, self._exchange_pg, device, inside, between)
        # Row pieces are summed after they are received: an all-to-all replaces TorchRec's reduce-scatter, with its
        # codec.
        return ShardPooledDist(self.layout, self._exchange_pg, device, inside if summed else between)

    def _check_processable(self) -> None:
        """Raise for tables whose bags a processor after the exchange cannot weight.

        Raises:
            ConfigError: naming the table.
        """
        for info, tiling in zip(self.layout.infos, self.layout.tilings.values()):
            config, cut = info.embedding_config, tiling.cuts_rows
            if cut or (config.pooling is PoolingType.MEAN and not self.layout.is_weighted):
                why = "is sharded by rows: no rank has its whole bags" if cut else "is a MEAN table without weights"
                raise ConfigError(
                    f"feature_processor: table {config.name!r} {why}; process the features before they are sent, as "
                    "FeatureProcessedEmbeddingBagCollectionSharder does"
                )

    def _inside_hosts(self) -> bool:
        return all(
            info.param_sharding.sharding_type in HOST_TYPES and summed_inside_hosts(info, self._env.world_size)
            for info in self.layout.infos
        )

    def create_context(self, features: KeyedJaggedTensor) -> PooledContext:
        """The context of one forward on ``features``."""
        ctx = PooledContext(pg=self._exchange_pg)
        ctx.record_input(features, self.layout)
        return ctx


class SequenceSharding(TableSharding):
    """Unpooled tables, sharded together."""

    pooled = False

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Create the lookup of this rank's shards.

        Args:
            device: device of the rows.
            fused_params: settings of the fused kernels; the settings of a table's own info take precedence.
            feature_processor: must be None: unpooled rows have no weights.

        Raises:
            ConfigError: a feature processor.
        """
        if feature_processor is not None:
            raise ConfigError(
                f"feature_processor={type(feature_processor).__name__}: unpooled rows take no weights; use it with "
                "tables of bags"
            )
        from recinfer.distributed.tables.lookups import GroupedEmbeddingsLookup

        lookup = GroupedEmbeddingsLookup(
            grouped_configs=self._groups(fused_params),
            pg=self._env.process_group,
            device=device or self._device,
            sharding_type=ShardingType.DATA_PARALLEL if self.replicated else None,
            env=self._env,
        )
        self.fill(lookup)
        return lookup

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[SequenceShardingContext, Tensor, list[Tensor]]:
        """Create the output exchange of rows."""
        return ShardSequenceDist(
            self.layout, self._exchange_pg, self._rank, self._codecs(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
        )

    def create_context(self, features: KeyedJaggedTensor) -> SequenceShardingContext:
        """The context of one forward on ``features``."""
        return SequenceShardingContext(features_before_input_dist=features)
