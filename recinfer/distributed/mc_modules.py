"""Sharded ManagedCollisionCollection for training: each rank admits and evicts the ids of its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from recinfer.distributed.exchange.features import with_values
from recinfer.distributed.exchange.pooled import PooledContext
from recinfer.distributed.exchange.sequence import SequenceShardingContext, ShardSequenceDist
from recinfer.distributed.sharded.sharding import TableSharding
from recinfer.distributed.tables.global_tensors import global_tensor
from recinfer.distributed.tables.slots import Slot
from recinfer.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.shardings import ShardedCollectionContext
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect
from recinfer.module_tree import append_prefix
from recinfer.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from recinfer.modules.mc_slots import segments_of
from recinfer.optim.local_tensors import local_tensors
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "ManagedCollisionCollectionAwaitable",
    "ManagedCollisionCollectionSharder",
    "ShardedManagedCollisionCollection",
]

_MODULES = "_managed_collision_modules"
_LOCAL = frozenset(
    {"_output_segments_tensor", "_current_iter_tensor", "_hash_zch_bucket"}
)  # buffers that all ranks have alike


class ManagedCollisionCollectionAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """Awaitable of features with rows instead of raw ids, which waits when the features are first used.

    Args:
        rows: for each sharding, the rows of its outputs, int64 ``[ids, 1]`` each.
        names: for each sharding, the feature of each output.
        features: the raw ids, keys in the order of the result.
        places: feature -> position of each id among the ids that were sent; None: all were.
    """

    def __init__(
        self,
        rows: list[Awaitable[list[Tensor]]],
        names: list[list[str]],
        features: KeyedJaggedTensor,
        places: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._rows = rows
        self._names = names
        self._features = features
        self._places = places

    def _wait_impl(self) -> KeyedJaggedTensor:
        found = {name: part for names, rows in zip(self._names, self._rows) for name, part in zip(names, rows.wait())}
        places = self._places
        parts = [found[key] if places is None else found[key][places[key]] for key in list(self._features.keys())]
        return with_values(self._features, torch.cat(parts).view(-1) if parts else self._features.values())


class ShardedManagedCollisionCollection(nn.Module):
    """The managed collision modules of row_wise tables: each rank has the module of its rows.

    An id belongs to the rank ``id // ceil(input_size / ranks)``, as in TorchRec. The state dict has the keys of the
    unsharded module; buffers with an entry per slot are ShardedTensors over the ranks' rows.

    Args:
        module: the collection; its values are not kept, as in TorchRec: load a checkpoint.
        table_name_to_parameter_sharding: the plan of every table.
        env: the ranks.
        device: device of the buffers.
        embedding_shardings: the shardings of the embedding module with the same tables.

    Raises:
        ConfigError: a table that is not row_wise with a piece on each rank.
    """

    def __init__(
        self,
        module: ManagedCollisionCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        embedding_shardings: list[TableSharding],
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__()
        self._env = env
        self._device = device
        self._shardings = embedding_shardings
        self._pieces: dict[str, list[Rect]] = {}  # the row pieces of each table, rank by rank
        for sharding in embedding_shardings:
            for name, tiling in sharding.layout.tilings.items():
                _check(name, table_name_to_parameter_sharding[name], tiling.rects, env.world_size)
                self._pieces[name] = sorted(tiling.rects, key=lambda rect: rect.row_start)
        self._feature_to_table = {f: t for t, features in module._table_to_features.items() for f in features}
        modules = {}
        for name, pieces in self._pieces.items():
            mine = pieces[env.rank]
            whole: Any = module._managed_collision_modules[name]
            modules[name] = whole.rebuild_with_output_id_range(
                output_id_range=(mine.row_start, mine.row_stop),
                output_segments=[rect.row_start for rect in pieces] + [pieces[-1].row_stop],
                device=device,
            )
        self._managed_collision_modules = nn.ModuleDict(modules)
        group = env.process_group
        self._output_dists = [ShardSequenceDist(s.layout, group, env.rank, width=1) for s in embedding_shardings]
        self.register_load_state_dict_pre_hook(_take_local)
        self.register_state_dict_post_hook(_give_sharded)

    def rows_of(self, features: KeyedJaggedTensor) -> Tensor:
        """A row of the rank that each id belongs to, int64 ``[N]``: the first row of the id's segment."""
        sizes = features.length_per_key()
        parts = []
        for feature, ids in zip(features.keys(), features.values().long().split(sizes)):
            pieces = self._pieces[self._feature_to_table[feature]]
            firsts = torch.tensor([rect.row_start for rect in pieces], device=ids.device)
            module = self._module(self._feature_to_table[feature])
            parts.append(firsts[segments_of(ids, module.input_size() or 1, len(pieces))])
        return torch.cat(parts) if parts else features.values().long()

    def preprocess(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features with the ids that the modules look up: hashed, if a module has a hash function."""
        changed, parts = False, []
        for feature, ids in zip(features.keys(), features.values().split(features.length_per_key())):
            table = self._feature_to_table.get(feature)
            if table is not None:
                given = {table: JaggedTensor.from_parts_unchecked(ids, None, None)}
                hashed = self._module(table).preprocess(given)[table].values()
                changed |= hashed is not ids
                ids = hashed
            parts.append(ids)
        return with_values(features, torch.cat(parts)) if changed else features

    def compute(self, received: KJTList) -> KJTList:
        """Record the received ids, in training mode, and turn them into rows of this rank's pieces.

        Args:
            received: raw ids, one KeyedJaggedTensor for each sharding.
        """
        return KJTList([self._remapped(s, features) for s, features in zip(self._shardings, received)])

    @torch.no_grad()
    def output_dist(
        self,
        ctx: ShardedCollectionContext[Any],
        output: KJTList,
        features: KeyedJaggedTensor,
        places: dict[str, Tensor] | None = None,
    ) -> LazyAwaitable[KeyedJaggedTensor]:
        """Start sending rows to the ranks of their ids.

        Args:
            ctx: the context of the ids' exchange.
            output: the result of :meth:`compute`.
            features: this rank's raw ids.
            places: see :class:`ManagedCollisionCollectionAwaitable`.

        Returns:
            awaitable of the tables' features, in their order, with rows of whole tables instead of ids.
        """
        started, names = [], []
        for sharding, output_dist, context, found in zip(
            self._shardings, self._output_dists, ctx.sharding_contexts, output
        ):
            firsts = torch.tensor([slot.rect.row_start for slot in self._own_slots(sharding)])
            sizes = torch.tensor(found.length_per_key())
            rows = found.values() + torch.repeat_interleave(firsts, sizes).to(found.values().device)
            started.append(output_dist(rows.view(-1, 1), _way_back(context, found)))
            names.append([feature for _, _, feature in sharding.layout.outputs])
        keys = features.keys()
        given = features.permute([keys.index(feature) for feature in self._feature_to_table])
        return ManagedCollisionCollectionAwaitable(started, names, given, places)

    def _own_slots(self, sharding: TableSharding) -> list[Slot]:
        """The slots of this rank, one for each received feature."""
        first = sum(sharding.layout.slots_per_rank[: self._env.rank])
        return sharding.layout.slots[first : first + sharding.layout.slots_per_rank[self._env.rank]]

    def _remapped(self, sharding: TableSharding, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        slots = self._own_slots(sharding)
        sizes, strides = features.length_per_key(), features.stride_per_key()
        values, lengths = features.values().long().split(sizes), features.lengths().split(strides)
        rows = list(values)
        for table in dict.fromkeys(slot.rect.table for slot in slots):
            own = [i for i, slot in enumerate(slots) if slot.rect.table == table]
            module = self._module(table)
            # Policies that know features read the number of ids of each from the weights.
            ids = JaggedTensor.from_parts_unchecked(
                torch.cat([values[i] for i in own]),
                torch.tensor([sizes[i] for i in own]),
                torch.cat([lengths[i] for i in own]),
            )
            found = module.remap(module.profile({table: ids}))[table].values() - self._first_row(table)
            for i, part in zip(own, found.split([sizes[i] for i in own])):
                rows[i] = part
        return with_values(features, torch.cat(rows) if rows else features.values())

    def evict(self) -> dict[str, Tensor | None]:
        """Table -> rows to reset, int64 ``[n]``, relative to this rank's piece; None: no eviction."""
        evictions = {}
        for table in self._managed_collision_modules:
            rows = self._module(table).evict()
            evictions[table] = None if rows is None else rows - self._first_row(table)
        return evictions

    def open_slots(self) -> dict[str, Tensor]:
        """Table -> number of slots without an id in this rank's module, int64 ``[1]``."""
        return {table: self._module(table).open_slots() for table in self._managed_collision_modules}

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the buffers that differ between ranks."""
        for table in self._managed_collision_modules:
            module = self._module(table)
            for name, _ in module.named_buffers():
                if name not in _LOCAL and name not in module._non_persistent_buffers_set:
                    yield append_prefix(prefix, f"{_MODULES}.{table}.{name}")

    def sharded_buffers(self) -> Iterator[tuple[str, Tensor, str]]:
        """Name, local tensor and table of each buffer that differs between ranks."""
        for name in self.sharded_parameter_names():
            yield name, self.get_buffer(name), name.split(".")[1]

    def _module(self, table: str) -> ManagedCollisionModule:
        module = self._managed_collision_modules[table]
        assert isinstance(module, ManagedCollisionModule)
        return module

    def _first_row(self, table: str) -> int:
        return self._pieces[table][self._env.rank].row_start


def _way_back(context: Any, received: KeyedJaggedTensor) -> SequenceShardingContext:
    """The context of an exchange of one row per id, from that of the ids' exchange."""
    if isinstance(context, SequenceShardingContext):
        return context
    assert isinstance(context, PooledContext)
    found = SequenceShardingContext(sent_ids=context.sent_ids, lengths_after_input_dist=received.lengths())
    if context.route is not None:
        found.input_splits, found.output_splits = context.route.input_splits, context.route.output_splits
        found.sparse_features_recat = context.route.recat
    return found


def _check(table: str, plan: ParameterSharding, rects: list[Rect], world_size: int) -> None:
    if plan.sharding_type != ShardingType.ROW_WISE.value:
        raise ConfigError(
            f"table {table!r} with managed collisions is planned as {plan.sharding_type}; expected row_wise: each rank admits "
            "and evicts the ids of its own rows. Constrain it by ParameterConstraints(sharding_types=['row_wise'])"
        )
    if [rect.rank for rect in sorted(rects, key=lambda rect: rect.row_start)] != list(range(world_size)):
        raise ConfigError(
            f"table {table!r} with managed collisions has rows on ranks {sorted({r.rank for r in rects})}; expected one piece on "
            f"each of {world_size} ranks, in their order"
        )


def _give_sharded(module: nn.Module, destination: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, ShardedManagedCollisionCollection)
    env = module._env
    if env.process_group is None:
        return
    for name, tensor, table in module.sharded_buffers():
        pieces = module._pieces[table]
        places = [
            ShardMetadata(
                shard_offsets=[rect.row_start, *[0] * (tensor.dim() - 1)],
                shard_sizes=[rect.rows, *tensor.shape[1:]],
                placement=f"rank:{rect.rank}/{module._device}",
            )
            for rect in pieces
        ]
        whole = ShardedTensorMetadata(
            shards_metadata=places,
            size=torch.Size([pieces[-1].row_stop, *tensor.shape[1:]]),
            tensor_properties=TensorProperties(dtype=tensor.dtype),
        )
        destination[prefix + name] = global_tensor(
            [(tensor, places[env.rank])], whole, env.process_group, env.state_mesh
        )


def _take_local(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace sharded entries by this rank's part, and whole entries of an unsharded module by this rank's rows."""
    assert isinstance(module, ShardedManagedCollisionCollection)
    for name, tensor, table in module.sharded_buffers():
        given = state_dict.get(prefix + name)
        if given is None:
            continue
        mine = module._pieces[table][module._env.rank]
        if not isinstance(given, ShardedTensor) and given.shape[0] == module._pieces[table][-1].row_stop:
            parts = [given[mine.row_start : mine.row_stop]] if given.shape != tensor.shape else [given]
        else:
            parts = local_tensors(given)
        state_dict[prefix + name] = parts[0]


class ManagedCollisionCollectionSharder(BaseEmbeddingSharder[ManagedCollisionCollection]):
    """Shards a ManagedCollisionCollection with the shardings of its embedding module.

    Args:
        fused_params, qcomm_codecs_registry: as in the sharders of embedding modules; not used.
    """

    def shard(  # type: ignore[override]
        self,
        module: ManagedCollisionCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        embedding_shardings: list[TableSharding],
        device: torch.device | None = None,
        use_index_dedup: bool = False,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionCollection:
        """The sharded collection; raises ConfigError for tables that are not row_wise."""
        return ShardedManagedCollisionCollection(
            module, params, env, device or torch.device("cpu"), embedding_shardings, use_index_dedup=use_index_dedup
        )

    def shardable_parameters(self, module: ManagedCollisionCollection) -> dict[str, nn.Parameter]:
        """None: its tables are those of the embedding module."""
        return {}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """row_wise alone."""
        return [ShardingType.ROW_WISE.value]

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """The class of modules that this sharder shards."""
        return ManagedCollisionCollection
