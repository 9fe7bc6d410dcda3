"""Base of sharded collections: shardings (sets of tables that share exchanges), steps, parameters and state."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recinfer.distributed.comm.ranks import get_local_size
from recinfer.distributed.exchange.combine import JoinShardings
from recinfer.distributed.exchange.features import RowsOf, ShardFeaturesDist
from recinfer.distributed.exchange.inside_hosts import summed_inside_hosts
from recinfer.distributed.exchange.kjt_lists import KJTListSplitsAwaitable
from recinfer.distributed.sharded.id_check import IdCheck
from recinfer.distributed.sharded.infos import by_sharding_type
from recinfer.distributed.sharded.sharding import HOST_TYPES, ROW_TYPES, TableSharding
from recinfer.distributed.sharded.state import TableState
from recinfer.distributed.tables.values import fill_anew
from recinfer.distributed.types import (
    Awaitable,
    CommOp,
    EnumerableShardingSpec,
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
    ShardMetadata,
    rank_device,
)
from recinfer.distributed.types.embedding_modules import FeatureShardingMixIn, Out, ShardedEmbeddingModule
from recinfer.distributed.types.kernels import EmbeddingComputeKernel
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.shardings import EmbeddingShardingInfo, ShardedCollectionContext
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import data_type_to_dtype
from recinfer.optim.fused import FusedOptimizerModule, mark_fused
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["ShardedCollection"]

Context = TypeVar("Context", bound=ShardedCollectionContext[Any])


class ShardedCollection(ShardedEmbeddingModule[KJTList, list[Tensor], Out, Context], FusedOptimizerModule):
    """Base of the sharded EmbeddingBagCollection and EmbeddingCollection.

    Tables are divided into shardings; each has one input exchange, one lookup and one output exchange. Parameters
    and
    state have the keys of the unsharded module, ``<tables>.<table>.weight``.

    Args:
        infos: the tables in module order.
        env: the ranks.
        device: device of rows and buffers.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
        weights_later: weights are not sent with the ids.
    """

    tables_attribute: ClassVar[str]
    sharding_class: ClassVar[type[TableSharding]]

    def __init__(
        self,
        infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
        weights_later: bool = False,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._env = env
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self._infos = [_placed_on(info, self._device, env) for info in infos]
        self._check_ids = IdCheck(self._infos)
        self._checks_ids = True
        self._shardings = [
            self.sharding_class(members, env, self._device, qcomm_codecs_registry) for members in self._group_tables()
        ]
        self._input_dists = [
            sharding.create_input_dist(self._device, not weights_later) for sharding in self._shardings
        ]
        self._lookups: list[nn.Module] = [sharding.create_lookup(self._device) for sharding in self._shardings]
        self._output_dists = [sharding.create_output_dist(self._device) for sharding in self._shardings]
        self._place_tables()
        self._optim = CombinedOptimizer(self._fused_optimizers())
        self._average_replicas()
        where = {(id(i), n): (g, at) for g, i, n, at in self._outputs_of_shardings()}
        self._names = [name for info in self._infos for name in info.names()]
        self._dims = [info.embedding_config.embedding_dim for info in self._infos for _ in info.names()]
        self._join = JoinShardings(
            [sharding.embedding_dims() for sharding in self._shardings],
            [where[id(info), name] for info in self._infos for name in info.names()],
        )

    def _group_tables(self) -> list[list[EmbeddingShardingInfo]]:
        """Divide the tables into as few shardings as possible; see :meth:`_group_of`."""
        members_of: dict[str, list[EmbeddingShardingInfo]] = {}
        for info in self._infos:
            members_of.setdefault(self._group_of(info), []).append(info)
        return list(members_of.values())

    def _group_of(self, info: EmbeddingShardingInfo) -> str:
        """The group of a table; the tables of a group form one sharding.

        Replicas need no exchange, and their kernels make either row updates or gradients. Pooled tables with sums over
        ranks form a separate sharding if they are summed inside hosts first, or have another codec."""
        kind = info.param_sharding.sharding_type
        if kind == ShardingType.DATA_PARALLEL.value:
            dense = info.param_sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
            return "dense replicas" if dense else "replicas"
        if not self.sharding_class.pooled:
            return "sharded"
        if kind in HOST_TYPES and summed_inside_hosts(info, self._env.world_size):
            return "summed inside hosts"
        ops = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
        codecs = [self.qcomm_codecs_registry.get(op.name) for op in ops]
        return "summed" if kind in ROW_TYPES and codecs[0] is not codecs[1] else "sharded"

    def _outputs_of_shardings(self) -> Iterator[tuple[int, EmbeddingShardingInfo, str, int]]:
        for g, sharding in enumerate(self._shardings):
            at = 0
            for info in sharding.layout.infos:
                for name in info.names():
                    yield g, info, name, at
                    at += 1

    def _place_tables(self) -> None:
        """``<tables>.<table>`` in the module tree, over the rows that the lookups own."""
        local: dict[str, list[tuple[Rect, nn.Parameter]]] = {}
        for sharding, lookup in zip(self._shardings, self._lookups):
            parameters: Any = lookup.named_parameters_by_table()  # type: ignore[operator]
            for rect, (_, parameter) in zip(sharding.local_rects(), parameters):
                local.setdefault(rect.table, []).append((rect, parameter))
        tilings = {name: tiling for sharding in self._shardings for name, tiling in sharding.layout.tilings.items()}
        tables = nn.ModuleDict()
        for info in self._infos:
            name = info.embedding_config.name
            mine = local.get(name, [])
            tables[name] = TableState(
                [rect for rect, _ in mine],
                [p for _, p in mine] or [_empty_parameter(info, self._device)],
                tilings[name],
                self._env.process_group,
                self._env.state_mesh,
            )
        self.add_module(self.tables_attribute, tables)

    def _fused_optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The optimizers in the backward of the lookups, with the keys of the module's parameters."""
        found = []
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, FusedOptimizerModule):
                    found.append((self.tables_attribute, module.fused_optimizer))
        return found

    def _average_replicas(self) -> None:
        """Average the gradients of dense replicas over the ranks."""
        for i, (sharding, lookup) in enumerate(zip(self._shardings, self._lookups)):
            dense = any(table.compute_kernel is EmbeddingComputeKernel.DENSE for table in sharding.embedding_tables())
            if sharding.replicated and dense and self._env.process_group is not None and self._env.world_size > 1:
                self._lookups[i] = DistributedDataParallel(
                    lookup,
                    process_group=self._env.process_group,
                    gradient_as_bucket_view=True,
                )

    # ------------------------------------------------------------------------------------------------- documented members

    @property
    def shardings(self) -> dict[str, FeatureShardingMixIn]:
        """Sharding type -> sharding of the tables of that type.

        The module itself exchanges all types together; these shardings are for inspection.
        """
        return {
            kind: self.sharding_class(members, self._env, self._device, self.qcomm_codecs_registry)
            for kind, members in by_sharding_type(self._infos).items()
        }

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers that run in the backward, as one; keys are the module's parameter names."""
        return self._optim

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Runs before the tables' own hooks, which return the rows as they are in memory.
        self.flush()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        # Runs before the tables' own hooks. Tables that are missing in the loaded state keep their changed rows.
        self.flush()
        self.purge()
        super()._load_from_state_dict(*args)

    def reset_parameters(self) -> None:
        """Initialise all tables again; all ranks must call this."""
        self.purge()
        for sharding, lookup in zip(self._shardings, self._lookups):
            sharding.fill(lookup.module if isinstance(lookup, DistributedDataParallel) else lookup)

    def take_raw_ids(self, rows_of: RowsOf) -> None:
        """Take raw ids from now on; the tables' ranks turn them into rows before :meth:`compute`.

        Args:
            rows_of: see ShardFeaturesDist.
        """
        self._checks_ids = False
        for input_dist in self._input_dists:
            assert isinstance(input_dist, ShardFeaturesDist)
            input_dist.rows_of = rows_of

    @torch.no_grad()
    def reset_rows(self, table: str, rows: Tensor) -> None:
        """Give rows of a table that this rank holds their first values again, and their optimizer's state zeros.

        Args:
            rows: int64 ``[n]``, relative to this rank's rectangles, which have all of the table's rows on this rank.
        """
        self.flush()
        config = next(info.embedding_config for info in self._infos if info.embedding_config.name == table)
        for lookup in self._lookups:
            pieces: Any = lookup.pieces_of(table)  # type: ignore[operator]
            for piece in pieces:
                weight = piece.parameter.data
                fresh = torch.empty((rows.numel(), weight.shape[1]), dtype=weight.dtype, device=weight.device)
                fill_anew(fresh, config)
                weight[rows] = fresh
                for state in piece.state.values():
                    state[rows] = 0
        self.purge()

    def _begin(self, ctx: Context, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable[Any]:
        features = self._check_ids(features) if self._checks_ids else features
        awaitables = []
        for sharding, input_dist in zip(self._shardings, self._input_dists):
            context = sharding.create_context(features)
            ctx.sharding_contexts.append(context)
            awaitables.append(input_dist(features, context))
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: Context, dist_input: KJTList) -> list[Tensor]:
        """Look up the local shards: ``[vectors, local columns]`` per sharding.

        A vector belongs to an example of any rank if tables are pooled, else to a received id.
        """
        return [lookup(features) for lookup, features in zip(self._lookups, dist_input)]

    def output_dist(self, ctx: Context, output: list[Tensor]) -> LazyAwaitable[Out]:
        """Start sending vectors to the ranks of their examples."""
        steps: Any = zip(self._output_dists, output, ctx.sharding_contexts)
        return self._outputs(ctx, [output_dist(vectors, context) for output_dist, vectors, context in steps])

    def compute_and_output_dist(self, ctx: Context, input: KJTList) -> LazyAwaitable[Out]:
        """Run both steps; a sharding's vectors are sent while the next sharding is looked up."""
        steps: Any = zip(self._output_dists, self._lookups, input, ctx.sharding_contexts)
        return self._outputs(
            ctx, [output_dist(lookup(features), context) for output_dist, lookup, features, context in steps]
        )

    @abc.abstractmethod
    def _outputs(self, ctx: Context, awaitables: list[Awaitable[Any]]) -> LazyAwaitable[Out]:
        """The module's outputs, from awaitables of each sharding's vectors."""


def _empty_parameter(info: EmbeddingShardingInfo, device: torch.device) -> nn.Parameter:
    """The empty parameter for a table of which this rank holds no shard, with the same attributes as on other ranks."""
    dtype = data_type_to_dtype(info.embedding_config.data_type)
    parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
    if info.param_sharding.compute_kernel != EmbeddingComputeKernel.DENSE.value:
        mark_fused(parameter)
    return parameter


def _placed_on(info: EmbeddingShardingInfo, device: torch.device, env: ShardingEnv) -> EmbeddingShardingInfo:
    """``info`` with its shards placed on ``device``'s kind of device, and this rank's shards on ``device``. A plan for
    GPUs thus runs on CPU and a plan for CPU on GPUs, with the same ranks."""
    sharding = info.param_sharding
    shards = getattr(sharding.sharding_spec, "shards", [])
    places = [shard.placement for shard in shards]
    if device.type == "meta" or all(p is None or p.device() is None or p.device().type == device.type for p in places):
        return info
    local_size = get_local_size(env.world_size)

    def place(rank: int) -> torch.device:
        return device if rank == env.rank else rank_device(device.type, rank % local_size)

    moved = [
        ShardMetadata(
            shard_offsets=shard.shard_offsets,
            shard_sizes=shard.shard_sizes,
            placement=f"rank:{shard.placement.rank()}/{place(shard.placement.rank())}",
        )
        for shard in shards
    ]
    return replace(info, param_sharding=replace(sharding, sharding_spec=EnumerableShardingSpec(moved)))
