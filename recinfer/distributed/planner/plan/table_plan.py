"""One table of a plan as plain data: sharding type, kernel, precision, and rectangles on ranks that tile it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from recinfer.distributed.types import ParameterSharding, ShardingType
from recinfer.distributed.types.edges import rects_of
from recinfer.distributed.types.kernels import EmbeddingComputeKernel
from recinfer.errors import ConfigError
from recinfer.layout.cuts import column_unit
from recinfer.layout.rect import Rect, tile
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType
from recinfer.strict_json import build, raising_config_error

__all__ = ["ShardRect", "TableJson", "TablePlan", "table_plan"]

_SHARDING_TYPES = frozenset(t.value for t in ShardingType)
_KERNELS = frozenset(k.value for k in EmbeddingComputeKernel)

ShardRect = Rect  # the planner's name of the class


@dataclass(frozen=True)
class TablePlan:
    """Sharding type, kernel, precision and shards of one table.

    Args:
        module: path of its embedding collection in the model.
        table: name of the table.
        sharding_type, compute_kernel: values of ``ShardingType`` and ``EmbeddingComputeKernel``.
        precision: element type of the stored rows.
        num_embeddings, embedding_dim: rows and columns of the whole table.
        shards: rectangles that cover it exactly once (data_parallel: the whole table on each rank that has it).
            Rectangles without a table name get this table's name.
        estimates: the planner's estimates (ms, bytes); not part of the hash.

    Raises:
        ConfigError: unknown names; its subclass TilingError for rectangles that do not tile the table.
    """

    module: str
    table: str
    sharding_type: str
    compute_kernel: str
    precision: DataType
    num_embeddings: int
    embedding_dim: int
    shards: tuple[Rect, ...]
    estimates: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.sharding_type not in _SHARDING_TYPES:
            self._fail(f"unknown sharding type {self.sharding_type!r}; expected one of {sorted(_SHARDING_TYPES)}")
        if self.compute_kernel not in _KERNELS:
            self._fail(f"unknown compute kernel {self.compute_kernel!r}; expected one of {sorted(_KERNELS)}")
        if others := {rect.table for rect in self.shards} - {self.table}:
            if others != {""}:
                self._fail(f"has shards of other tables: {sorted(others)}")
            object.__setattr__(self, "shards", tuple(replace(rect, table=self.table) for rect in self.shards))
        tile(
            self.name,
            self.num_embeddings,
            self.embedding_dim,
            self.shards,
            column_unit=column_unit(self.precision),
            replicated=self.sharding_type == ShardingType.DATA_PARALLEL.value,
        )

    def _fail(self, message: str) -> None:
        raise ConfigError(f"table {self.name!r} of the plan: {message}")

    @property
    def name(self) -> str:
        """``module.table``."""
        return f"{self.module}.{self.table}" if self.module else self.table

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each shard, in shard order."""
        return tuple(s.rank for s in self.shards)

    def placement_data(self) -> dict[str, Any]:
        """The data that the hash covers."""
        return {
            "module": self.module,
            "table": self.table,
            "sharding_type": self.sharding_type,
            "compute_kernel": self.compute_kernel,
            "precision": self.precision.value,
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "shards": [[s.rank, s.row_start, s.row_stop, s.col_start, s.col_stop] for s in self.shards],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> TablePlan:
        """The inverse of :meth:`placement_data`, with ``estimates`` if ``data`` has them; raises ConfigError."""
        with raising_config_error():
            return build(TableJson, data, "table").plan()


@dataclass(frozen=True)
class TableJson:
    """The JSON of a :class:`TablePlan`: a shard is its rank, first and last row, first and last column."""

    module: str
    table: str
    sharding_type: str
    compute_kernel: str
    precision: str
    num_embeddings: int
    embedding_dim: int
    shards: tuple[tuple[int, int, int, int, int], ...]
    estimates: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> TablePlan:
        """The table; raises ConfigError."""
        shards = tuple(Rect(*shard, self.table) for shard in self.shards)
        return TablePlan(**{**vars(self), "precision": DataType.parse(self.precision), "shards": shards})


def table_plan(
    path: str, config: BaseEmbeddingConfig, sharding: ParameterSharding, precision: DataType, world_size: int
) -> TablePlan:
    """The checked rectangles of one table from TorchRec's ParameterSharding; raises ConfigError."""
    rows, cols = config.num_embeddings, config.embedding_dim
    rects = tuple(rects_of(config.name, rows, cols, sharding, world_size))
    return TablePlan(path, config.name, sharding.sharding_type, sharding.compute_kernel, precision, rows, cols, rects)
