"""The search space as arrays: tables, their options, the options' shards, each estimated.

Options of one table are neighbours, shards of one option too (``option_ptr``, ``shard_ptr``). The search moves *units*:
one table, or several that must share ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from recinfer.distributed.planner.constants import (
    MIN_CW_DIM,
    UVM_CACHING_RATIO,
)
from recinfer.distributed.planner.model.constraints import PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.estimates import (
    KERNEL_CODES,
    KERNELS,
    TYPE_CODES,
    TYPE_NAMES,
    Estimate,
    FloatN,
    IntN,
    ShardArrays,
    of_types,
    read_bandwidth,
    row_format_code,
    row_pieces,
    row_weights,
)
from recinfer.distributed.planner.model.facts import TableFacts
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.types.kernels import kernels_where, tier_code
from recinfer.distributed.types.sharding_types import PartitionByType, types_where
from recinfer.distributed.types.tiers import TIERS
from recinfer.layout.cuts import column_width, even_rows, heights_in_proportion

__all__ = ["SearchSpace", "build_space"]

_CACHED = [KERNEL_CODES[name] for name in kernels_where(lambda rule: rule.cached)]


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """Options and shards of all tables, estimated. O options, S shards, M storage tiers."""

    tables: Sequence[TableFacts]
    option_ptr: IntN  # [T+1] first option of each table
    option_table: IntN  # [O]
    option_type: IntN  # [O] sharding type code
    option_kernel: IntN  # [O]
    shard_ptr: IntN  # [O+1] first shard of each option
    shard_option: IntN  # [S]
    rect: IntN  # [S, 4] row, rows, column, columns
    fixed_rank: IntN  # [S] the rank per shard must have, -1 when free
    perf: FloatN = field(default_factory=lambda: np.zeros((0, 6)))  # [S, 6]
    total: FloatN = field(default_factory=lambda: np.zeros(0))  # [S] ms
    bytes: IntN = field(default_factory=lambda: np.zeros((len(TIERS), 0), np.int64))  # [M, S]

    @property
    def num_options(self) -> int:
        """Options."""
        return self.option_table.size

    def shards_of(self, option: int) -> slice:
        """Shards of an option."""
        return slice(int(self.shard_ptr[option]), int(self.shard_ptr[option + 1]))

    def options_of(self, table: int) -> range:
        """Options of a table."""
        return range(int(self.option_ptr[table]), int(self.option_ptr[table + 1]))


def build_space(
    tables: Sequence[TableFacts],
    topology: Topology,
    estimate: Estimate,
) -> SearchSpace:
    """Enumerate and estimate every offered option of every table.

    Args:
        tables: the tables.
        topology: ranks.
        estimate: fills in perf [S, 6] and bytes [M, S].

    Raises:
        PlannerError: a table with no option.
    """
    for table in tables:
        if not table.offers:
            _no_options(table)
    num = np.array([len(t.offers) for t in tables], np.int64)
    option_ptr = np.concatenate([[0], np.cumsum(num)]).astype(np.int64)
    option_table = np.repeat(np.arange(len(tables)), num)
    option_type = np.array([TYPE_CODES[s] for t in tables for s, _ in t.offers], np.int64)
    option_kernel = np.array([KERNEL_CODES[k] for t in tables for _, k in t.offers], np.int64)
    geometry = _geometry(tables, topology, option_table, option_type, _tiers(option_kernel, topology))
    space = SearchSpace(tables, option_ptr, option_table, option_type, option_kernel, *geometry)
    arrays = shard_arrays(space, topology)
    perf, num_bytes = estimate(arrays)
    total = perf[:, 0] + perf[:, 1] + perf[:, 2] + perf[:, 3] + perf[:, 5]
    return replace(space, perf=perf, total=total, bytes=num_bytes)


def _no_options(table: TableFacts) -> None:
    c = table.constraints
    asked = f"sharding types {c.sharding_types}, kernels {c.compute_kernels}" if c is not None else "no constraints"
    raise PlannerError(
        f"table {table.fqn!r} has no sharding option: the constraints ask for {asked}, and its sharder supports none "
        "of these on this device; widen the constraints or use another sharder",
        PlannerErrorType.STRICT_CONSTRAINTS,
    )


def _geometry(
    tables: Sequence[TableFacts],
    topology: Topology,
    option_table: IntN,
    option_type: IntN,
    option_tier: IntN,
) -> tuple[IntN, IntN, IntN, IntN]:
    """Rectangles of all options, vectorised: a grid of ``down`` x ``across`` pieces, column by column.

    Pieces are alike, except the rows of a row-wise table over ranks of unequal memory, which are in proportion to the
    memory.
    """
    world = topology.world_size
    rows = np.array([t.rows for t in tables], np.int64)[option_table]
    cols = np.array([t.cols for t in tables], np.int64)[option_table]
    column_types = set(types_where(lambda r: r.cuts_columns and not r.cuts_rows))
    # Widths depend on few distinct (cols, min_partition, alone) tuples.
    memo: dict[tuple[Any, ...], int] = {}
    width_of_table = np.empty(len(tables), np.int64)
    for i, t in enumerate(tables):
        alone = {s for s, _ in t.offers} <= column_types
        key = (t.cols, t.min_partition, alone)
        if key not in memo:
            memo[key] = _piece_width(*key, ranks=world)
        width_of_table[i] = memo[key]
    by_columns = of_types(option_type, lambda r: r.cuts_columns)
    width = np.where(by_columns, width_of_table[option_table], cols)
    across = np.where(by_columns, cols // width, 1)
    down = row_pieces(option_type, topology)
    replicated = of_types(option_type, lambda r: r.replicated)
    replicas = np.where(replicated, world, 1)

    count = across * down * replicas
    shard_ptr = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    shard_option = np.repeat(np.arange(option_table.size), count)
    index = np.arange(shard_ptr[-1]) - shard_ptr[shard_option]
    s_down = down[shard_option]
    i_down = np.where(replicated[shard_option], 0, index % s_down)
    i_across = np.where(replicated[shard_option], 0, index // s_down)
    start, height = even_rows(rows[shard_option], s_down, i_down)
    by_ranks = of_types(option_type, lambda r: r.one_row_piece_per_rank)
    for tier in range(len(TIERS)):
        if (weights := row_weights(topology, tier)) is not None:
            for option in np.flatnonzero(by_ranks & (option_tier == tier)):
                pieces = slice(shard_ptr[option], shard_ptr[option + 1])
                height[pieces] = heights_in_proportion(int(rows[option]), weights)
                start[pieces] = np.cumsum(height[pieces]) - height[pieces]
    rect = np.stack([start, height, i_across * width[shard_option], width[shard_option]], axis=1)
    uniform = of_types(option_type, lambda r: r.partition is PartitionByType.UNIFORM)
    fixed = np.where(uniform[shard_option], index, -1)
    return shard_ptr, shard_option, rect, fixed


def _piece_width(cols: int, min_partition: int | None, alone: bool, ranks: int) -> int:
    width = column_width(cols, min_partition or MIN_CW_DIM)
    # Only column pieces are allowed: cut even a narrow table, down to pieces of 32 columns.
    if alone and min_partition is None and width == cols:
        width = column_width(cols, max(32, -(-cols // ranks)))
    return width


def _tiers(kernels: IntN, topology: Topology) -> IntN:
    """The number of the tier of the rows of each kernel."""
    return np.array([tier_code(name, topology.compute_device) for name in KERNELS])[kernels]


def shard_arrays(space: SearchSpace, topology: Topology) -> ShardArrays:
    """The inputs of the estimates, one entry per shard."""
    tables, o = space.tables, space.option_table

    def column(get: Callable[[TableFacts], Any], dtype: Any = np.float64) -> npt.NDArray[Any]:
        return np.array([get(t) for t in tables], dtype)

    kernel = space.option_kernel
    cached = np.isin(kernel, _CACHED)
    given = column(lambda t: np.nan if t.cache_ratio is None else t.cache_ratio)[o]
    ratio = np.where(cached, np.where(np.isnan(given), UVM_CACHING_RATIO, given), 0.0)
    bandwidth = np.empty(space.num_options)
    memo: dict[tuple[int, float, bool], float] = {}
    prefetch = column(lambda t: t.prefetch, bool)[o]
    for i, key in enumerate(zip(kernel.tolist(), ratio.tolist(), prefetch.tolist())):
        if key not in memo:
            bw = read_bandwidth(topology, *key)
            if bw is None:
                raise PlannerError(
                    f"kernel {KERNELS[key[0]]!r} (table {tables[o[i]].fqn!r}) does not run on "
                    f"{topology.compute_device}; constrain the table to other kernels",
                    PlannerErrorType.INVALID_COMPUTE_KERNEL,
                )
            memo[key] = bw
        bandwidth[i] = memo[key]
    per_option = {
        "kind": space.option_type,
        "table_rows": column(lambda t: t.rows, np.int64)[o],
        "table_cols": column(lambda t: t.cols, np.int64)[o],
        "batch_inputs": column(lambda t: t.batch_inputs)[o],
        "batch_outputs": column(lambda t: t.batch_outputs)[o],
        "filled_outputs": column(lambda t: t.filled_outputs)[o],
        "features": column(lambda t: len(t.input_lengths))[o],
        "pooled": column(lambda t: t.pooled, bool)[o],
        "weighted": column(lambda t: t.weighted, bool)[o],
        "element_bytes": column(lambda t: t.element_bytes)[o],
        "row_format": column(lambda t: row_format_code(t.precision), np.int64)[o],
        "output_bytes": column(lambda t: t.output_bytes)[o],
        "fwd_a2a": column(lambda t: t.comm_bytes[0])[o],
        "bwd_a2a": column(lambda t: t.comm_bytes[1])[o],
        "fwd_sr": column(lambda t: t.comm_bytes[2])[o],
        "bwd_sr": column(lambda t: t.comm_bytes[3])[o],
        "device_bw": bandwidth,
        "misses": np.where(cached, column(lambda t: t.misses)[o], 0.0),
        "cached": cached,
        "tier": _tiers(kernel, topology),
        "cache_ratio": ratio,
        "optimizer_full": column(lambda t: t.optimizer_full)[o],
        "optimizer_row_bytes": column(lambda t: t.optimizer_row_bytes)[o],
        "id_row_bytes": column(lambda t: t.id_row_bytes)[o],
    }
    s = space.shard_option
    return ShardArrays(
        rows=space.rect[:, 1], cols=space.rect[:, 3], **{name: value[s] for name, value in per_option.items()}
    )


def option_label(space: SearchSpace, option: int) -> tuple[str, str]:
    """(sharding type, kernel) of an option."""
    return TYPE_NAMES[int(space.option_type[option])], KERNELS[int(space.option_kernel[option])]
