"""The sharding types, one row each: how a table is cut, on which ranks its shards lie, who may use the type.

A new type is a member of :class:`ShardingType` and a row of :data:`SHARDING_RULES`: the planner, its estimates and
tables, sharders, plans by hand and sharded modules read the row. Costs follow from it: a rank looks up the ids of its row
piece, and partial sums travel where rows are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique

from recinfer.errors import ConfigError

__all__ = [
    "SHARDING_RULES",
    "PartitionByType",
    "ShardingRule",
    "ShardingType",
    "packed_sharding_types",
    "rule_of",
    "types_where",
]


@unique
class ShardingType(Enum):
    """How a table is divided into shards."""

    DATA_PARALLEL = "data_parallel"  # the whole table on every rank
    TABLE_WISE = "table_wise"  # the whole table on one rank
    COLUMN_WISE = "column_wise"  # column pieces, each on any rank
    ROW_WISE = "row_wise"  # row pieces, one on each rank of the world
    TABLE_ROW_WISE = "table_row_wise"  # row pieces, one on each rank of one host
    TABLE_COLUMN_WISE = "table_column_wise"  # column pieces on the ranks of one host
    GRID_SHARD = "grid_shard"  # column pieces, each cut into rows over the ranks of one host


class PartitionByType(Enum):
    """How the shards of an option must be placed."""

    DEVICE = "device"  # each shard on any rank
    HOST = "host"  # all shards on the ranks of one host
    UNIFORM = "uniform"  # shard i on rank i
    MULTI_HOST = "multi_host"  # groups of shards, each group on the ranks of one host


def _one(world: int, local: int) -> int:
    return 1


def _each_rank(world: int, local: int) -> int:
    return world


def _each_rank_of_a_host(world: int, local: int) -> int:
    return local


@dataclass(frozen=True)
class ShardingRule:
    """A sharding type.

    Attributes:
        kind: the type.
        short: abbreviation in the planner's tables.
        partition: where its shards may lie.
        row_pieces: number of row pieces of a table, or of each of its column pieces, on ``world`` ranks, ``local`` of
            them on each host.
        cuts_columns: columns are cut into pieces of equal width.
        replicated: every rank holds the whole table.
        sums_inside_hosts: the row pieces of a column share a host, which adds up their vectors.
        unpooled: unpooled tables may use the type.
        packed: the planner offers the type to quantized tables.
        on_request: the planner offers the type only if the constraints of a table name it.
    """

    kind: ShardingType
    short: str
    partition: PartitionByType
    row_pieces: Callable[[int, int], int] = _one
    cuts_columns: bool = False
    replicated: bool = False
    sums_inside_hosts: bool = False
    unpooled: bool = False
    packed: bool = False
    on_request: bool = False

    @property
    def cuts_rows(self) -> bool:
        """Whether a shard may have only a part of the rows; its vectors are then partial sums."""
        return self.row_pieces is not _one

    @property
    def one_row_piece_per_rank(self) -> bool:
        """Whether each rank has one row piece, whose height may follow the rank's memory."""
        return self.cuts_rows and self.partition is PartitionByType.UNIFORM


_T, _P = ShardingType, PartitionByType
# The numbers of the types in the planner's arrays are their positions here; the planner's choice among equal options
# depends on the order.
SHARDING_RULES = (
    ShardingRule(_T.DATA_PARALLEL, "DP", _P.UNIFORM, replicated=True, unpooled=True),
    ShardingRule(_T.TABLE_WISE, "TW", _P.DEVICE, unpooled=True, packed=True),
    ShardingRule(_T.COLUMN_WISE, "CW", _P.DEVICE, cuts_columns=True, unpooled=True, packed=True),
    ShardingRule(_T.ROW_WISE, "RW", _P.UNIFORM, _each_rank, unpooled=True, packed=True),
    ShardingRule(_T.TABLE_ROW_WISE, "TWRW", _P.HOST, _each_rank_of_a_host, sums_inside_hosts=True),
    ShardingRule(_T.TABLE_COLUMN_WISE, "TWCW", _P.HOST, cuts_columns=True),
    ShardingRule(
        _T.GRID_SHARD,
        "GS",
        _P.MULTI_HOST,
        _each_rank_of_a_host,
        cuts_columns=True,
        sums_inside_hosts=True,
        on_request=True,
    ),
)
_RULES = {rule.kind.value: rule for rule in SHARDING_RULES}


def rule_of(sharding_type: str) -> ShardingRule:
    """The row of a ``ShardingType`` value; raises ConfigError for an unknown one."""
    if sharding_type not in _RULES:
        raise ConfigError(f"sharding type {sharding_type!r}; expected one of {sorted(_RULES)}")
    return _RULES[sharding_type]


def packed_sharding_types() -> list[str]:
    """The values of the types that the planner offers to quantized tables, first those with whole rows."""
    return types_where(lambda r: r.packed and not r.cuts_columns) + types_where(lambda r: r.packed and r.cuts_columns)


def types_where(condition: Callable[[ShardingRule], bool]) -> list[str]:
    """The values of the types whose row meets ``condition``, in the order of the table."""
    return [rule.kind.value for rule in SHARDING_RULES if condition(rule)]
