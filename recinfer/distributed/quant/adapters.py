"""TorchRec's names for grouped lookups of packed shards on the devices of one process.

These classes only adapt :class:`recinfer.distributed.quant.runtime.PackedLookup` to TorchRec's names and states of packed
rows.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from recinfer.distributed.fused_params import output_dtype_of
from recinfer.distributed.quant.runtime import PackedLookup, tables_of
from recinfer.distributed.types import rank_device
from recinfer.distributed.types.embedding_modules import BaseEmbeddingLookup, BaseGroupedFeatureProcessor
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.tables import GroupedEmbeddingConfig
from recinfer.errors import CheckpointError, ConfigError
from recinfer.quant.arranger import FeatureArranger
from recinfer.quant.buffers import allocate
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen

__all__ = [
    "InferGroupedEmbeddingsLookup",
    "InferGroupedLookupMixin",
    "InferGroupedPooledEmbeddingsLookup",
    "MetaInferGroupedEmbeddingsLookup",
    "MetaInferGroupedPooledEmbeddingsLookup",
]


class InferGroupedLookupMixin(abc.ABC):
    """State of lookups that hold packed rows: ``<table>.weight``, uint8 ``[rows, bytes of a row]``.

    Packed rows are buffers, since they are not trained. Where several pieces of a table are held, their names are
    ``<table>.weight``, ``<table>.weight_1`` and so on.
    """

    @abc.abstractmethod
    def _ranks(self) -> list[PackedLookup]:
        """The lookup of each device."""

    def _packed(self) -> list[tuple[str, Tensor]]:
        """Name and packed rows of every piece."""
        seen: dict[str, int] = {}
        result = []
        for rank in self._ranks():
            for placed in rank.tables:
                table = placed.rect.table
                count = seen[table] = seen.get(table, -1) + 1
                result.append((f"{table}.weight" + (f"_{count}" if count else ""), rank.buffers.rows(placed)))
        return result

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """FBGEMM's modules over the same bytes, with their configs."""
        return {group.batch.fbgemm_module(): group.config for rank in self._ranks() for group in rank.kernels}

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
            CheckpointError: rows of another size; with ``strict``, missing or unexpected names.
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
                f"packed rows do not fit: missing {missing}, unexpected {unexpected}{'; ' if wrong else ''}"
                f"{'; '.join(wrong)}"
            )
        for name, rows in own.items():
            if name in state_dict:
                rows.copy_(state_dict[name])
        for rank in self._ranks():
            for group in rank.kernels:
                group.batch.forget_cached()
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """No parameters: packed rows are buffers."""
        yield from ()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and packed rows of every piece."""
        for name, rows in self._packed():
            yield f"{prefix}.{name}" if prefix else name, rows


class _MetaLookup(InferGroupedLookupMixin, nn.Module):  # type: ignore[misc]
    """Base of the lookups on one device."""

    def __init__(
        self,
        grouped_configs: Sequence[GroupedEmbeddingConfig],
        device: torch.device | None,
        pooled: bool,
        fused_params: Mapping[str, Any] | None,
        processed: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        buffers, placed = allocate(tables_of(grouped_configs), torch.device(device or "cpu"))
        self.rank = PackedLookup(
            grouped_configs,
            placed,
            buffers,
            pooled=pooled,
            is_weighted=processed,
            output_dtype=lambda group: output_dtype_of({**(fused_params or {}), **(group.fused_params or {})}),
        )
        tables = [table for group in grouped_configs for table in group.embedding_tables]
        names = [feature for table in tables for feature in table.feature_names]
        self._arranger = FeatureArranger(names, [table.local_rows for table in tables for _ in table.feature_names])

    def _ranks(self) -> list[PackedLookup]:
        return [self.rank]


class MetaInferGroupedPooledEmbeddingsLookup(_MetaLookup):
    """Pooled vectors of one device's packed shards; rows are zeros until a state is loaded.

    Args:
        grouped_configs: the groups; features come in their order.
        device: device of the rows.
        feature_processor: turns features into weighted features before the lookup; its weights are used even if the
            groups are not weighted.
        fused_params: ``output_dtype``, float32, float16 or bfloat16, where the groups have none; other keys, for caches
            and registration, have no effect.
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
        self._arranger.check(sparse_features)
        return self.rank.pooled(sparse_features)


class MetaInferGroupedEmbeddingsLookup(_MetaLookup):
    """One row per id, of one device's packed shards of one width.

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
        self._arranger.check(sparse_features)
        parts = self.rank(sparse_features)
        return torch.cat(parts) if parts else torch.empty(0, 0, device=self.rank.buffers.device)


class _InferLookup(InferGroupedLookupMixin, BaseEmbeddingLookup[KJTList, list[Tensor]]):  # type: ignore[misc]
    """Base of the lookups on several devices."""

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
        """The lookup of each rank."""
        return self._embedding_lookups_per_rank

    def forward(self, sparse_features: KJTList) -> list[Tensor]:
        """Every device's vectors, on that device."""
        return [lookup(features) for lookup, features in zip(self.lookups, sparse_features)]

    def _ranks(self) -> list[PackedLookup]:
        return [lookup.rank for lookup in self.lookups]


class InferGroupedPooledEmbeddingsLookup(_InferLookup):
    """Pooled vectors of packed shards on several devices.

    Args:
        grouped_configs_per_rank: the groups of each device.
        world_size: devices.
        fused_params: see :class:`MetaInferGroupedPooledEmbeddingsLookup`.
        device: its type determines the devices, as for KJTOneToAll.
    """

    _one_device = MetaInferGroupedPooledEmbeddingsLookup


class InferGroupedEmbeddingsLookup(_InferLookup):
    """One row per id, of packed shards on several devices. Args: as :class:`InferGroupedPooledEmbeddingsLookup`."""

    _one_device = MetaInferGroupedEmbeddingsLookup
