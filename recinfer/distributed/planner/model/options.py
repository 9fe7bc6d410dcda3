"""Shard and ShardingOption: one way to shard a table, with estimates and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recinfer.distributed.planner.model.topology import Perf, Storage
from recinfer.distributed.types import BoundsCheckMode, CacheParams, DataType, KeyValueParams
from recinfer.distributed.types.sharding_types import rule_of
from recinfer.layout.rect import Rect

__all__ = ["Shard", "ShardingOption", "partition_by_of"]


def partition_by_of(sharding_type: str) -> str:
    """The :class:`PartitionByType` value of a sharding type; raises ConfigError for an unknown one."""
    return rule_of(sharding_type).partition.value


@dataclass
class Shard:
    """A rectangle: ``size`` and ``offset`` are [rows, columns]; storage and perf once estimated, rank once placed."""

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def rect(self, table: str) -> Rect:
        """The shard as a :class:`Rect`; on rank 0 if it is not placed."""
        (row, col), (rows, cols) = self.offset, self.size
        return Rect(self.rank or 0, row, row + rows, col, col + cols, table)

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))

    def __str__(self) -> str:
        return f"Shard size: {tuple(self.size)}, offset: {tuple(self.offset)}, {self.storage}, {self.perf}, {self.rank}"


class ShardingOption:
    """An option: one way to shard one table.

    Args:
        name: table name.
        tensor: the table's weight (meta is enough).
        module: (path, module) of its embedding collection.
        input_lengths: mean ids per bag of each feature.
        batch_size: samples per rank.
        sharding_type, partition_by, compute_kernel: enum values.
        shards: rectangles of the option.
        dependency: options with the same value must share ranks (co-location).
        is_pooled: pooled lookup; default: that of the module.
        feature_names: features of the table.
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        module: tuple[str, nn.Module],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        cache_params: CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: BoundsCheckMode | None = None,
        dependency: str | None = None,
        is_pooled: bool | None = None,
        feature_names: list[str] | None = None,
        output_dtype: DataType | None = None,
        key_value_params: KeyValueParams | None = None,
        num_poolings: list[float] | None = None,
    ) -> None:
        self.name = name
        self._tensor = tensor
        self._module = module
        self.input_lengths = input_lengths
        self.batch_size = batch_size
        self.sharding_type = sharding_type
        self.partition_by = partition_by
        self.compute_kernel = compute_kernel
        self.shards = shards
        self.cache_params = cache_params
        self.enforce_hbm = enforce_hbm
        self.stochastic_rounding = stochastic_rounding
        self.bounds_check_mode = bounds_check_mode
        self.dependency = dependency
        self._is_pooled = is_pooled
        self.feature_names = feature_names
        self.output_dtype = output_dtype
        self.key_value_params = key_value_params
        self.num_poolings = num_poolings

    @property
    def tensor(self) -> torch.Tensor:
        """The weight, or a meta tensor of its shape."""
        return self._tensor

    @property
    def module(self) -> tuple[str, nn.Module]:
        """(path, module)."""
        return self._module

    @property
    def fqn(self) -> str:
        """``path.table``."""
        return self.module[0] + "." + self.name

    @property
    def cache_load_factor(self) -> float | None:
        """Share of the rows that the cache holds, if set."""
        return self.cache_params.load_factor if self.cache_params is not None else None

    @property
    def path(self) -> str:
        """Module path."""
        return self.module[0]

    @property
    def num_shards(self) -> int:
        """Rectangles."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Features."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """Sum over the shards."""
        total = Storage(0, 0)
        for shard in self.shards:
            assert shard.storage is not None, f"{self.fqn} is not estimated"
            total += shard.storage
        return total

    @property
    def total_perf(self) -> float:
        """Milliseconds, summed over the shards."""
        return sum(shard.perf.total for shard in self.shards if shard.perf is not None)

    @property
    def is_pooled(self) -> bool:
        """Whether the table's collection pools."""
        if self._is_pooled is None:
            self._is_pooled = self.module_pooled(self.module[1], self.name)
        return self._is_pooled

    @staticmethod
    def module_pooled(module: nn.Module, sharding_option_name: str) -> bool:
        """Whether ``module`` pools: everything but a module with ``embedding_configs()``."""
        return not callable(getattr(module, "embedding_configs", None))

    @property
    def has_feature_processor(self) -> bool:
        """Whether the module weighs its features first."""
        return getattr(self.module[1], "_feature_processors", None) is not None

    def get_shards_assignment(self) -> list[int | None]:
        """The rank of each shard."""
        return [shard.rank for shard in self.shards]

    def __hash__(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel, tuple(self.shards), self.cache_params))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingOption) and hash(self) == hash(other)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> ShardingOption:
        copied = ShardingOption.__new__(ShardingOption)
        copied.__dict__.update(self.__dict__)
        copied.shards = [Shard(list(s.size), list(s.offset), s.storage, s.perf, s.rank) for s in self.shards]
        return copied

    def __str__(self) -> str:
        lines = [f"name: {self.name}", f"module: {self.path}", f"sharding type: {self.sharding_type}"]
        lines += [f"compute kernel: {self.compute_kernel}", f"partition by: {self.partition_by}"]
        return "\n".join([*lines, *(str(s) for s in self.shards)])
