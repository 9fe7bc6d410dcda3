"""Cache settings of tables in host memory, and statistics about the reuse of their rows."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

from recinfer.distributed.types.enums import CacheAlgorithm
from recinfer.modules.embedding_configs import DataType

__all__ = [
    "CacheParams",
    "CacheStatistics",
]


class CacheStatistics(abc.ABC):
    """Interface of statistics about the reuse of a table's rows, by which the planner chooses its cache size."""

    @property
    @abc.abstractmethod
    def expected_lookups(self) -> int:
        """Distinct rows looked up in one global batch."""

    @abc.abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Share of lookups that miss a cache holding the fraction ``clf`` of the rows."""

    @property
    @abc.abstractmethod
    def cacheability(self) -> float:
        """Area under the miss curve: 0 is perfectly cacheable, 1 not at all."""


@dataclass
class CacheParams:
    """Cache settings of a table in host memory.

    Args:
        algorithm: eviction.
        load_factor: share of the table's rows that the cache holds, 0 to 1.
        reserved_memory: bytes reserved for the cache.
        precision: element type of the cached rows.
        prefetch_pipeline: the training pipeline prefetches cache lines.
        stats: reuse statistics of the table.
        multipass_prefetch_config: passed to the kernel unchanged.
    """

    algorithm: CacheAlgorithm | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: CacheStatistics | None = None
    multipass_prefetch_config: Any | None = None

    def __hash__(self) -> int:
        stats = self.stats
        return hash(
            (
                self.algorithm,
                self.load_factor,
                self.reserved_memory,
                self.precision,
                self.prefetch_pipeline,
                (stats.expected_lookups, stats.cacheability) if stats is not None else None,
            )
        )
