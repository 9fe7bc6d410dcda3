"""Converts placements to plans, and pins tables of an earlier plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recinfer.distributed.planner.constants import BIGINT_DTYPE
from recinfer.distributed.planner.model.constraints import PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.estimates import (
    PERF_PARTS,
    IntN,
    of_types,
    spread_of,
)
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.plan.table_plan import TablePlan
from recinfer.distributed.planner.solve.placing import Placement
from recinfer.distributed.planner.solve.problem import FREE, Problem
from recinfer.distributed.planner.solve.search_report import SearchReport
from recinfer.distributed.planner.solve.space import SearchSpace, option_label, shard_arrays
from recinfer.distributed.types.tiers import TIER_NAMES
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect

__all__ = ["build_plan", "chosen_options", "pin_tables"]


def chosen_options(problem: Problem, placement: Placement) -> list[tuple[int, IntN]]:
    """(option of the search space, ranks of its shards) of every table."""
    chosen = []
    for unit in range(problem.num_units):
        choice = int(placement.choice[unit])
        ranks = placement.ranks[unit]
        if problem.mode[choice] == FREE:
            ranks = np.sort(
                ranks
            )  # pieces of a table are equal: assign neighbours to one rank, so that columns stay contiguous
        chosen += [(option, ranks) for option in problem.space_options(choice)]
    return chosen


def build_plan(
    space: SearchSpace,
    problem: Problem,
    placement: Placement,
    report: SearchReport,
    topology: Topology,
    *,
    batch_size: int,
    keep_empty: bool = True,
) -> Plan:
    """The plan as data, tables in the order of the space; ``keep_empty`` keeps shards of no rows."""
    entries: list[TablePlan | None] = [None] * len(space.tables)
    world = topology.world_size
    inputs, outputs = np.zeros(world), np.zeros(world)
    traffic = _traffic(space, topology)
    for option, ranks in chosen_options(problem, placement):
        t = int(space.option_table[option])
        s = space.shards_of(option)
        np.add.at(inputs, ranks, traffic[0][s])
        np.add.at(outputs, ranks, traffic[1][s])
        entries[t] = _entry(space, option, ranks, keep_empty)
    estimates = {
        "batch_size": batch_size,
        "max_perf_ms": report.max_perf,
        "lower_bound_ms": report.lower_bound,
        "gap": report.gap,
        "proven_optimal": report.proven,
        "perf_ms_per_rank": placement.perf.tolist(),
        **{f"{name}_bytes_per_rank": [int(x) for x in used] for name, used in zip(TIER_NAMES, placement.used)},
        **{f"{name}_cap_per_rank": [int(x) for x in caps] for name, caps in zip(TIER_NAMES, problem.caps)},
        "input_bytes_per_rank": [int(x) for x in inputs],
        "output_bytes_per_rank": [int(x) for x in outputs],
    }
    tables = tuple(e for e in entries if e is not None)
    return Plan(world, topology.compute_device, tables, estimates, topology.local_world_size)


def _entry(space: SearchSpace, option: int, ranks: IntN, keep_empty: bool) -> TablePlan:
    table = space.tables[int(space.option_table[option])]
    s = space.shards_of(option)
    sharding_type, kernel = option_label(space, option)
    shards = tuple(
        Rect(int(rank), int(r), int(r + h), int(c), int(c + w), table.name)
        for rank, (r, h, c, w) in zip(ranks, space.rect[s])
        if h > 0 or keep_empty
    )
    parts = {name: float(x) for name, x in zip(PERF_PARTS, space.perf[s].sum(axis=0)) if x}
    return TablePlan(
        module=table.module_path,
        table=table.name,
        sharding_type=sharding_type,
        compute_kernel=kernel,
        precision=table.precision,
        num_embeddings=table.rows,
        embedding_dim=table.cols,
        shards=shards,
        estimates={
            "perf_ms": float(space.total[s].sum()),
            "max_shard_ms": float(space.total[s].max()),
            **{f"{name}_bytes": int(shards[s].sum()) for name, shards in zip(TIER_NAMES, space.bytes)},
            **({"index_bytes": round(table.rows * table.id_row_bytes)} if table.id_row_bytes else {}),
            **parts,
        },
    )


def _traffic(space: SearchSpace, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of ids received and of vectors sent by each shard in one iteration."""
    a = shard_arrays(space, topology)
    quant = np.char.startswith(np.array([option_label(space, o)[1] for o in range(space.num_options)]), "quant")
    replicas = np.where(quant[space.shard_option] | of_types(a.kind, lambda r: r.replicated), 1, topology.world_size)
    ids = a.batch_inputs / spread_of(a, topology) * replicas
    vectors = np.where(a.pooled, a.batch_outputs * replicas, ids)
    return ids * BIGINT_DTYPE, vectors * a.cols * a.output_bytes


def pin_tables(space: SearchSpace, pinned: Sequence[TablePlan], topology: Topology) -> dict[int, tuple[int, IntN]]:
    """Table -> (option, ranks) for entries of an earlier plan.

    Raises:
        PlannerError: a pinned table that is not in the model, or whose pieces match no option.
    """
    index = {(t.module_path, t.name): i for i, t in enumerate(space.tables)}
    found: dict[int, tuple[int, IntN]] = {}
    for entry in pinned:
        if (entry.module, entry.table) not in index:
            raise ConfigError(f"pinned table {entry.name!r} is not in the model")
        t = index[entry.module, entry.table]
        found[t] = _matching_option(space, t, entry, topology)
    return found


def _matching_option(space: SearchSpace, t: int, entry: TablePlan, topology: Topology) -> tuple[int, IntN]:
    want = {(s.row_start, s.rows, s.col_start, s.cols): s.rank for s in entry.shards if s.rows}
    for option in space.options_of(t):
        if option_label(space, option) != (entry.sharding_type, entry.compute_kernel):
            continue
        s = space.shards_of(option)
        rects = [tuple(int(x) for x in row) for row in space.rect[s]]
        fixed = space.fixed_rank[s]
        ranks = np.array([want.get((r[0], r[1], r[2], r[3]), max(int(f), 0)) for r, f in zip(rects, fixed)], np.int64)
        filled = {r for r in rects if r[1]}
        if entry.sharding_type == "data_parallel":
            return option, fixed
        if filled == set(want) and ranks.max() < topology.world_size:
            return option, ranks
    raise PlannerError(
        f"pinned table {entry.name!r} ({entry.sharding_type}/{entry.compute_kernel}, {len(entry.shards)} pieces) "
        f"matches no option of this model and topology ({topology.world_size} ranks); unpin it or plan on the same "
        "ranks",
        PlannerErrorType.PLAN_LOADING_FAILED,
    )
