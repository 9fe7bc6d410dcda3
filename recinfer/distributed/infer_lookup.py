"""Grouped lookups of packed shards on the devices of one process, and the sharding that feeds and joins them.

TorchRec's names for what :mod:`recinfer.distributed.quant_embeddingbag` does at once: one lookup a device, each holding
its rectangles' packed rows, between a copy of ids to the devices and a copy of vectors back. The layout is the one that
training uses, the op is the one that serving uses.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from recinfer.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    GroupedEmbeddingConfig,
    KJTList,
    ShardedEmbeddingTable,
)
from recinfer.distributed.fused_params import output_dtype_of
from recinfer.distributed.quant_buffers import allocate_shards, rows_view
from recinfer.distributed.quant_layout import PackedShard, slot_of
from recinfer.distributed.quant_placement import memory_of
from recinfer.distributed.types import rank_device
from recinfer.errors import CheckpointError, ConfigError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.collection import row_alignment_for
from recinfer.quant.rows import padded_dim
from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen, TableBatch
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "InferGroupedEmbeddingsLookup",
    "InferGroupedLookupMixin",
    "InferGroupedPooledEmbeddingsLookup",
    "MetaInferGroupedEmbeddingsLookup",
    "MetaInferGroupedPooledEmbeddingsLookup",
]


class _PackedGroup:
    """The shards of one grouped config behind one op call, their packed rows where its compute kernels say."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pooling: PoolingType,
        device: torch.device,
        fused_params: Mapping[str, Any] | None,
        processed: bool,
    ) -> None:
        self.config = config
        self.is_weighted = config.is_weighted or processed
        self.alignment = row_alignment_for(device)
        types = {table.name: table.data_type for table in config.embedding_tables}
        shards = [
            PackedShard(t.name, 0, t.local_rows, 0, t.local_cols, 0, 0, memory_of(t.compute_kernel))
            for t in config.embedding_tables
        ]
        buffer, managed, self.shards = allocate_shards(types, shards, device, self.alignment)
        slots = [slot_of(shard, types[shard.table], managed) for shard in self.shards]
        self.of_feature = [i for i, t in enumerate(config.embedding_tables) for _ in t.feature_names]
        dtype = output_dtype_of({**(fused_params or {}), **(config.fused_params or {})})
        self.batch = TableBatch(
            slots,
            self.of_feature,
            pooling,
            buffer,
            row_alignment=self.alignment,
            output_dtype=dtype,
            managed=managed,
        )
        names = [f for t in config.embedding_tables for f in t.feature_names]
        self.arranger = FeatureArranger(names, [slots[i].rows for i in self.of_feature])
        self.rows = [rows_view(shard, types[shard.table], buffer, managed, self.alignment) for shard in self.shards]
        dims = [(slots[i].dim, padded_dim(slots[i].dim, slots[i].data_type)) for i in self.of_feature]
        ends = list(accumulate((padded for _, padded in dims), initial=0))
        real = [at + c for at, (dim, _) in zip(ends, dims) for c in range(dim)]
        self.real = None if len(real) == ends[-1] or pooling is PoolingType.NONE else torch.tensor(real, device=device)
        self.dim = slots[0].dim if slots else 0

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        self.arranger.check(features)
        weights = features.weights_or_none() if self.is_weighted else None
        out = self.batch(features.values(), features.offsets(), weights)
        if self.batch.pooling is PoolingType.NONE:
            return out[:, : self.dim]
        return out if self.real is None else out.index_select(1, self.real)


class InferGroupedLookupMixin(abc.ABC):
    """State of lookups that hold packed rows: ``<table>.weight``, uint8 ``[rows, bytes of a row]``.

    Packed rows are buffers: there is nothing to train. Where a device holds several pieces of a table, their names are
    ``<table>.weight``, ``<table>.weight_1`` and so on.
    """

    @abc.abstractmethod
    def _packed(self) -> list[tuple[str, Tensor]]:
        """Name and packed rows of every piece."""

    @abc.abstractmethod
    def _rows_changed(self) -> None:
        """The rows were written."""

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The packed rows, not copied."""
        destination = OrderedDict() if destination is None else destination
        for name, rows in self._packed():
            destination[prefix + name] = rows
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> _IncompatibleKeys:
        """Copy packed rows in.

        Raises:
            CheckpointError: rows of another size; with ``strict``, names that are missing or not expected.
        """
        own = dict(self._packed())
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        wrong = [
            f"{name} is {state_dict[name].dtype} {tuple(state_dict[name].shape)}, expected uint8 {tuple(rows.shape)}"
            for name, rows in own.items()
            if name in state_dict and (state_dict[name].shape != rows.shape or state_dict[name].dtype != torch.uint8)
        ]
        if wrong or (strict and (missing or unexpected)):
            raise CheckpointError(
                f"packed rows do not fit: missing {missing}, not expected {unexpected}{'; ' if wrong else ''}"
                f"{'; '.join(wrong)}"
            )
        for name, rows in own.items():
            if name in state_dict:
                rows.copy_(state_dict[name])
        self._rows_changed()
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """None: packed rows are buffers."""
        yield from ()

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Name and packed rows of every piece."""
        for name, rows in self._packed():
            yield f"{prefix}.{name}" if prefix else name, rows


class _MetaLookup(InferGroupedLookupMixin, nn.Module):  # type: ignore[misc]
    """One device's groups."""

    def __init__(
        self,
        grouped_configs: Sequence[GroupedEmbeddingConfig],
        device: torch.device | None,
        pooled: bool,
        fused_params: Mapping[str, Any] | None,
        processed: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        device = torch.device(device or "cpu")
        self.__dict__["_groups"] = [
            _PackedGroup(c, c.pooling if pooled else PoolingType.NONE, device, fused_params, processed)
            for c in grouped_configs
        ]
        self._splits = [config.num_features() for config in grouped_configs]
        self._device = device

    @property
    def pieces(self) -> list[tuple[ShardedEmbeddingTable, Tensor]]:
        """Every piece and its packed rows."""
        return [p for group in self.__dict__["_groups"] for p in zip(group.config.embedding_tables, group.rows)]

    def _packed(self) -> list[tuple[str, Tensor]]:
        seen: dict[str, int] = {}
        result = []
        for table, rows in self.pieces:
            count = seen[table.name] = seen.get(table.name, -1) + 1
            result.append((f"{table.name}.weight" + (f"_{count}" if count else ""), rows))
        return result

    def _rows_changed(self) -> None:
        for group in self.__dict__["_groups"]:
            group.batch.forget_cached()

    def _parts(self, features: KeyedJaggedTensor) -> list[Tensor]:
        groups = self.__dict__["_groups"]
        parts = [features] if len(groups) == 1 else features.split(self._splits)
        return [group(part) for group, part in zip(groups, parts)]

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """FBGEMM's modules over the same bytes, and what they look up."""
        return {group.batch.fbgemm_module(): group.config for group in self.__dict__["_groups"]}

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """None: packed rows are buffers."""
        return InferGroupedLookupMixin.named_parameters(self, prefix, recurse)

    def named_buffers(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and packed rows of every piece."""
        return InferGroupedLookupMixin.named_buffers(self, prefix, recurse)


class MetaInferGroupedPooledEmbeddingsLookup(_MetaLookup):
    """Pooled vectors of one device's packed shards; rows are zero bytes until a state is loaded.

    Args:
        grouped_configs: the groups; features come in their order.
        device: where the rows lie.
        feature_processor: turns features into weighted features before the lookup; its weights are used whatever the
            groups say.
        fused_params: ``output_dtype``, float32, float16 or bfloat16, where the groups have none; other keys are settings of
            caches and registration, which the op does not need.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, True, fused_params, feature_processor is not None)
        self._feature_processor = feature_processor

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B, sum of the groups' columns]``.

        Raises:
            InputError: an id beyond a table's rows.
        """
        if self._feature_processor is not None:
            sparse_features = self._feature_processor(sparse_features)
        parts = self._parts(sparse_features)
        return torch.cat(parts, dim=1) if parts else torch.empty(sparse_features.stride(), 0, device=self._device)


class MetaInferGroupedEmbeddingsLookup(_MetaLookup):
    """One row an id, of one device's packed shards of one width.

    Args: as :class:`MetaInferGroupedPooledEmbeddingsLookup`, without a feature processor.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, False, fused_params)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[N, D]``: rows of the ids in their order.

        Raises:
            InputError: an id beyond a table's rows.
        """
        parts = self._parts(sparse_features)
        return torch.cat(parts) if parts else torch.empty(0, 0, device=self._device)


class _InferLookup(InferGroupedLookupMixin, BaseEmbeddingLookup[KJTList, list[Tensor]]):  # type: ignore[misc]
    """All devices' lookups."""

    _one_device: type[_MetaLookup]

    def __init__(
        self,
        grouped_configs_per_rank: list[list[GroupedEmbeddingConfig]],
        world_size: int,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if len(grouped_configs_per_rank) != world_size:
            raise ConfigError(
                f"{type(self).__name__}: got the groups of {len(grouped_configs_per_rank)} ranks; expected {world_size}"
            )
        kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        make: Any = self._one_device
        self._embedding_lookups_per_rank: list[_MetaLookup] = [
            make(groups, device=rank_device(kind, rank), fused_params=fused_params)
            for rank, groups in enumerate(grouped_configs_per_rank)
        ]

    @property
    def lookups(self) -> list[_MetaLookup]:
        """One a rank."""
        return self._embedding_lookups_per_rank

    def forward(self, sparse_features: KJTList) -> list[Tensor]:
        """Every device's vectors, on that device."""
        return [lookup(features) for lookup, features in zip(self.lookups, sparse_features)]

    def _packed(self) -> list[tuple[str, Tensor]]:
        # Pieces of one table on several devices are told apart as several pieces on one device are.
        seen: dict[str, int] = {}
        result = []
        for table, rows in (piece for lookup in self.lookups for piece in lookup.pieces):
            count = seen[table.name] = seen.get(table.name, -1) + 1
            result.append((f"{table.name}.weight" + (f"_{count}" if count else ""), rows))
        return result

    def _rows_changed(self) -> None:
        for lookup in self.lookups:
            lookup._rows_changed()

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """FBGEMM's modules of all devices, and what they look up."""
        return {tbe: config for lookup in self.lookups for tbe, config in lookup.get_tbes_to_register().items()}


class InferGroupedPooledEmbeddingsLookup(_InferLookup):
    """Pooled vectors of packed shards on several devices.

    Args:
        grouped_configs_per_rank: what each device looks up.
        world_size: devices.
        fused_params: as :class:`MetaInferGroupedPooledEmbeddingsLookup`.
        device: its type says what the devices are, as for KJTOneToAll.
    """

    _one_device = MetaInferGroupedPooledEmbeddingsLookup


class InferGroupedEmbeddingsLookup(_InferLookup):
    """One row an id, of packed shards on several devices. Args: as :class:`InferGroupedPooledEmbeddingsLookup`."""

    _one_device = MetaInferGroupedEmbeddingsLookup
