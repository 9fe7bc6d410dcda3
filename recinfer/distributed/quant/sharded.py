"""Sharded quantized EmbeddingBagCollection and EmbeddingCollection over the ranks of one process, and their sharders.

Intended differences from TorchRec: weights are present when a module is built, outputs keep the module's feature order,
MEAN divides by the full bag, every precision can be sharded, and on one CPU host one op call serves all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from recinfer.distributed.exchange.pooled import PooledContext
from recinfer.distributed.exchange.sequence import SequenceShardingContext
from recinfer.distributed.fused_params import check_packed_params
from recinfer.distributed.quant.place import PackedTables, place_buffer, place_module
from recinfer.distributed.quant.tables import C, Ctx, ShardedQuantTables
from recinfer.distributed.sharded.typed_sharder import TypedSharder
from recinfer.distributed.types import ParameterSharding, ShardingEnv
from recinfer.distributed.types.embedding_sharders import BaseQuantEmbeddingSharder
from recinfer.distributed.types.kjt_lists import ListOfKJTList
from recinfer.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from recinfer.quant.buffers import Placed
from recinfer.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.lookup import PooledLookup, SequenceLookup
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollectionSharder",
    "ShardedQuantEmbeddingBagCollection",
    "ShardedQuantEmbeddingCollection",
]


L = TypeVar("L", PooledLookup, SequenceLookup)
Out = TypeVar("Out", KeyedTensor, dict[str, JaggedTensor])


class _ShardedQuantCollection(ShardedQuantTables[C, Ctx], Generic[C, Ctx, L, Out]):
    """A sharded quantized collection of either kind; a subclass names the kind's parts.

    Attributes:
        _lookup, _context: classes of the fused call and of the steps' context.
        _option: the collection's boolean: ``is_weighted`` of bags, ``need_indices`` of rows.
        _place: the documented module of the class.
    """

    _lookup: Callable[..., L]
    _context: Callable[[], Ctx]
    _option: ClassVar[str]
    _place: ClassVar[str]

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        check_packed_params(self._place, fused_params, module.output_dtype())
        packed = place_module(module, table_name_to_parameter_sharding, env, fused=fused)
        configs = module.embedding_bag_configs() if self.pooled else module.embedding_configs()
        option = getattr(module, self._option)()
        self._set(configs, table_name_to_parameter_sharding, packed, module.output_dtype(), device, option)

    def _set(
        self,
        configs: Sequence[C],
        plans: Mapping[str, ParameterSharding],
        packed: PackedTables,
        output_dtype: torch.dtype,
        device: torch.device | None,
        option: bool,
    ) -> None:
        lookup, whole = None, packed.whole
        if whole is not None:
            options = {self._option: option, "output_dtype": output_dtype}
            lookup = type(self)._lookup(configs, whole.pieces, whole.buffers, **options)
        super().__init__(configs, plans, packed, lookup, output_dtype, device, weighted=self.pooled and option)
        self._chosen = option

    @classmethod
    def _of_packed(
        cls,
        tables: Sequence[C],
        shards: Sequence[Placed],
        buffer: Tensor,
        option: bool,
        output_dtype: torch.dtype,
        **placing: Any,
    ) -> Self:
        packed = place_buffer(tables, shards, buffer, **placing)
        self = cls.__new__(cls)
        self._set(tables, {}, packed, output_dtype, None, option)
        return self

    @property
    def fused_lookup(self) -> L | None:
        """The call over all ranks' shards, for callers with features in its order; None if the shards need several
        calls."""
        found: L | None = self._fused
        return found

    def create_context(self) -> Ctx:
        """A context for the steps, with the data of the input that the last step needs."""
        return type(self)._context()

    def forward(self, features: KeyedJaggedTensor) -> Out:  # type: ignore[override]
        """Vectors of every feature: pooled, or one per id."""
        if self._fused is not None:
            found: Out = self._fused.forward(features)
            return found
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))

    def compute_and_output_dist(self, ctx: Ctx, input: ListOfKJTList) -> Out:  # type: ignore[override]
        """Run :meth:`compute` and :meth:`output_dist`."""
        found: Out = self.output_dist(ctx, self.compute(ctx, input))  # type: ignore[assignment]
        return found


class ShardedQuantEmbeddingBagCollection(
    _ShardedQuantCollection[EmbeddingBagConfig, PooledContext, PooledLookup, KeyedTensor]
):
    """A quantized EmbeddingBagCollection whose tables are sharded over the ranks of one process.

    Args:
        module: the quantized collection (its packed rows are shared or copied, never changed).
        table_name_to_parameter_sharding: the plan of every table.
        env: ``ShardingEnv.from_local(world_size, 0)``.
        fused_params: ``output_dtype``, if given, must be the module's; other keys have no effect
            (:mod:`recinfer.ignored`).
        device: device of the outputs; default: CPU if every rank is on CPU, else rank 0's device.
        fused: None: one call if all ranks are on CPU; False: always run the steps input_dist, compute and output_dist.

    ``forward(features: KeyedJaggedTensor) -> KeyedTensor``, keys in module order, values [B, sum of dims]. Table- and
    column-wise results equal the unsharded module's bit for bit, row-wise to the rounding of the sum.

    Raises:
        ConfigError: a table has no plan, shards do not tile it, or a device does not exist.
    """

    pooled = True
    _lookup, _context, _option = PooledLookup, PooledContext, "is_weighted"
    _place = "distributed.quant_embeddingbag.ShardedQuantEmbeddingBagCollection"

    @classmethod
    def from_packed(
        cls,
        tables: Sequence[EmbeddingBagConfig],
        shards: Sequence[Placed],
        buffer: Tensor,
        *,
        is_weighted: bool = False,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        output_dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
        kernels: Mapping[str, str] | None = None,
    ) -> ShardedQuantEmbeddingBagCollection:
        """Build the module from packed shards in ``buffer`` (an archive's mapping), without a copy on CPU.

        Args:
            tables: configs in module order, ``data_type`` the packed precision.
            shards: every rank's shards, offsets into ``buffer`` (row alignment 1).
            buffer: uint8, 1-D, on CPU. Kept and read, never written.
            device: ``"cpu"``, or ``"cuda"``: rank r's rows are copied to ``cuda:r``.
            kernels: table -> compute kernel of its plan: on CUDA ``quant_uvm`` rows stay in host memory, those of
                ``quant_uvm_caching`` behind a cache on the GPU.
        """
        return cls._of_packed(
            tables,
            shards,
            buffer,
            is_weighted,
            output_dtype,
            world_size=world_size,
            device=device,
            fused=fused,
            kernels=kernels,
        )

    def _note(self, ctx: PooledContext, arranged: KeyedJaggedTensor) -> None:
        ctx.record_input(arranged, self._built().layout)

    def compute(self, ctx: PooledContext, dist_input: ListOfKJTList) -> list[list[Tensor]]:
        """Each rank's sums ``[B, columns of the rank]``, on its device."""
        return [[lookup.pooled(features) for lookup, features in self._looked_up(dist_input)]]

    def output_dist(self, ctx: PooledContext, output: list[list[Tensor]]) -> KeyedTensor:  # type: ignore[override]
        """Copy the ranks' outputs to one device: concatenate column pieces, add row pieces, divide MEAN by the full
        bag."""
        values_BD = self._built().home(self._output_device)(output[0], ctx)
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=values_BD.to(self._output_dtype))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self.weighted


class ShardedQuantEmbeddingCollection(
    _ShardedQuantCollection[EmbeddingConfig, SequenceShardingContext, SequenceLookup, dict[str, JaggedTensor]]
):
    """A quantized EmbeddingCollection whose tables are sharded over the ranks of one process.

    Args as :class:`ShardedQuantEmbeddingBagCollection`.
    ``forward(features) -> dict[str, JaggedTensor]`` in module order, equal bit for bit to the unsharded module.
    """

    pooled = False
    _lookup, _context, _option = SequenceLookup, SequenceShardingContext, "need_indices"
    _place = "distributed.quant_embedding.ShardedQuantEmbeddingCollection"

    @classmethod
    def from_packed(
        cls,
        tables: Sequence[EmbeddingConfig],
        shards: Sequence[Placed],
        buffer: Tensor,
        *,
        need_indices: bool = False,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        output_dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
        kernels: Mapping[str, str] | None = None,
    ) -> ShardedQuantEmbeddingCollection:
        """Build the module from packed shards; see :meth:`ShardedQuantEmbeddingBagCollection.from_packed`."""
        return cls._of_packed(
            tables,
            shards,
            buffer,
            need_indices,
            output_dtype,
            world_size=world_size,
            device=device,
            fused=fused,
            kernels=kernels,
        )

    def _note(self, ctx: SequenceShardingContext, arranged: KeyedJaggedTensor) -> None:
        ctx.features_before_input_dist = arranged

    def compute(self, ctx: SequenceShardingContext, dist_input: ListOfKJTList) -> list[list[Tensor]]:
        """Each rank's rows, concatenated in one dimension, on its device."""
        found = []
        for lookup, features in self._looked_up(dist_input):
            rows = [part.reshape(-1) for part in lookup(features)]
            found.append(torch.cat(rows) if rows else torch.empty(0, device=lookup.buffers.device))
        return [found]

    def output_dist(  # type: ignore[override]
        self, ctx: SequenceShardingContext, output: list[list[Tensor]]
    ) -> dict[str, JaggedTensor]:
        """Combine the pieces in the order of ids and columns."""
        layout, asked = self._built().layout, ctx.features_before_input_dist
        assert asked is not None, "call input_dist before output_dist"
        pieces = iter(self._built().home(self._output_device)(output[0], ctx))
        found = {}
        for (name, _, feature), columns in zip(layout.outputs, layout.sums):
            parts = [next(pieces) for _ in columns]
            values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            mine = asked[feature]
            found[name] = JaggedTensor(
                values=values.to(self._output_dtype),
                lengths=mine.lengths().to(self._output_device),
                weights=mine.values().to(self._output_device) if self._chosen else None,
            )
        return found

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self._chosen


class QuantEmbeddingBagCollectionSharder(
    BaseQuantEmbeddingSharder[EmbeddingBagCollection],
    TypedSharder[EmbeddingBagCollection, ShardedQuantEmbeddingBagCollection],
):
    """Shards :class:`recinfer.quant.embedding_modules.EmbeddingBagCollection` by a plan."""

    _takes, _makes = EmbeddingBagCollection, ShardedQuantEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(
    BaseQuantEmbeddingSharder[EmbeddingCollection], TypedSharder[EmbeddingCollection, ShardedQuantEmbeddingCollection]
):
    """Shards :class:`recinfer.quant.embedding_modules.EmbeddingCollection` by a plan."""

    _takes, _makes = EmbeddingCollection, ShardedQuantEmbeddingCollection
