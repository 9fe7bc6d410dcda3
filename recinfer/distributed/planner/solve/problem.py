"""The placement problem: units with options and shards, ranks with capacities; and its lower bounds.

A unit is one table, or several that must share ranks. An option of a unit is a set of shards, each with a load (ms) and
bytes; a plan picks one option per unit and one rank per shard, so that the largest sum of loads on a rank is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recinfer.distributed.planner.model.constraints import PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.estimates import FloatN, IntN, of_types
from recinfer.distributed.planner.model.topology import Topology, tier_bytes
from recinfer.distributed.planner.solve.space import SearchSpace
from recinfer.distributed.types.sharding_types import PartitionByType, ShardingRule

__all__ = ["Bound", "Problem", "lower_bound", "make_problem", "problem_of"]

# Modes of placing the shards of an option.
FREE, FIXED, HOST, HOST_FREE, MULTI_HOST = range(5)


@dataclass(frozen=True, eq=False)
class Problem:
    """U units, O options, S shards, W ranks, M storage tiers."""

    unit_ptr: IntN  # [U+1]
    option_unit: IntN  # [O]
    mode: IntN  # [O] FREE ... MULTI_HOST
    shard_ptr: IntN  # [O+1]
    perf: FloatN  # [S]
    bytes: FloatN  # [M, S]
    fixed_rank: IntN  # [S]
    option_perf: FloatN  # [O] sums over shards, and the largest shard
    option_max: FloatN
    option_bytes: FloatN  # [M, O]
    possible: npt.NDArray[np.bool_]  # [O] every shard fits an empty rank
    caps: FloatN  # [M, W]
    local_world_size: int
    members: tuple[tuple[int, ...], ...] | None  # [O] option of the space for each option; None: the same number

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.caps.shape[1]

    @property
    def num_units(self) -> int:
        """Units."""
        return self.unit_ptr.size - 1

    def shards_of(self, option: int) -> slice:
        """Shards of an option."""
        return slice(int(self.shard_ptr[option]), int(self.shard_ptr[option + 1]))

    def space_options(self, option: int) -> tuple[int, ...]:
        """The options of the search space that form an option, one for each table of the unit."""
        return (option,) if self.members is None else self.members[option]


def _mode(rule: ShardingRule) -> int:
    if rule.partition is PartitionByType.HOST:
        return HOST if rule.cuts_rows else HOST_FREE
    return {PartitionByType.UNIFORM: FIXED, PartitionByType.MULTI_HOST: MULTI_HOST}.get(rule.partition, FREE)


def make_problem(space: SearchSpace, topology: Topology, pinned: dict[int, tuple[int, IntN]] | None = None) -> Problem:
    """The problem of ``space`` on ``topology``.

    Args:
        pinned: table -> (option, ranks of its shards), the table's only option and place.

    Raises:
        PlannerError: co-located tables with no option in common.
    """
    mode = of_types(space.option_type, _mode)
    mates: dict[str, list[int]] = {}
    for t, table in enumerate(space.tables):
        if table.colocate_with is not None:
            mates.setdefault(table.colocate_with, []).append(t)
    together = {t: members for members in mates.values() if len(members) > 1 for t in members}
    if not together and not pinned:
        shard_ptr, fixed = space.shard_ptr, space.fixed_rank
        arrays = space.total, space.bytes.astype(float)
        return problem_of(space.option_ptr, mode, shard_ptr, arrays, fixed, topology)
    return _of_units(space, topology, mode, together, pinned or {})


def _of_units(
    space: SearchSpace,
    topology: Topology,
    mode: IntN,
    together: dict[int, list[int]],
    pinned: dict[int, tuple[int, IntN]],
) -> Problem:
    unit_ptr, modes, members = [0], [], []
    parts: list[tuple[FloatN, FloatN, IntN]] = []
    num_bytes = space.bytes.astype(float)
    for t in range(len(space.tables)):
        mates = together.get(t, [t])
        if mates[0] != t:
            continue
        if len(mates) > 1 and any(m in pinned for m in mates):
            names = [space.tables[m].fqn for m in mates]
            raise PlannerError(f"tables {names} are co-located and some of them pinned; pin all or none of them",
                               PlannerErrorType.STRICT_CONSTRAINTS)  # fmt: skip
        for options in _common_options(space, mates):
            if t in pinned and options[0] != pinned[t][0]:
                continue
            slices = [space.shards_of(o) for o in options]
            perf = np.sum([space.total[s] for s in slices], axis=0)
            fixed = pinned[t][1] if t in pinned else space.fixed_rank[slices[0]]
            parts.append((perf, np.sum([num_bytes[:, s] for s in slices], axis=0), fixed))
            modes.append(FIXED if t in pinned else mode[options[0]])
            members.append(options)
        unit_ptr.append(len(members))
    shard_ptr = np.concatenate([[0], np.cumsum([p[0].size for p in parts])]).astype(np.int64)
    arrays = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts], axis=1)
    fixed_rank = np.concatenate([p[2] for p in parts])
    return problem_of(np.array(unit_ptr), np.array(modes), shard_ptr, arrays, fixed_rank, topology, tuple(members))


def _common_options(space: SearchSpace, tables: list[int]) -> list[tuple[int, ...]]:
    """Options that all ``tables`` have: same type, kernel and number of shards."""
    if len(tables) == 1:
        return [(o,) for o in space.options_of(tables[0])]
    keyed = []
    for t in tables:
        counts = space.shard_ptr[1:] - space.shard_ptr[:-1]
        keyed.append(
            {
                (int(space.option_type[o]), int(space.option_kernel[o]), int(counts[o])): o
                for o in space.options_of(t)
            }
        )  # fmt: skip
    common = [key for key in keyed[0] if all(key in other for other in keyed[1:])]
    if not common:
        names = [space.tables[t].fqn for t in tables]
        raise PlannerError(
            f"tables {names} must share ranks (colocate_with={space.tables[tables[0]].colocate_with!r}) but have no "
            "sharding type, kernel and number of pieces in common; widen their constraints, or set min_partition so "
            "that they have equally many column pieces",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    return [tuple(other[key] for other in keyed) for key in common]


def problem_of(
    unit_ptr: IntN,
    mode: IntN,
    shard_ptr: IntN,
    arrays: tuple[FloatN, FloatN],
    fixed: IntN,
    topology: Topology,
    members: tuple[tuple[int, ...], ...] | None = None,
) -> Problem:
    """The problem with its sums.

    Args:
        arrays: load [S], and bytes in each tier [M, S], of each shard.
        members: options of the search space for each option, if they differ.
    """
    perf, num_bytes = arrays
    starts = shard_ptr[:-1]
    caps = np.ascontiguousarray(np.array([tier_bytes(d.storage) for d in topology.devices], float).T)
    free = fixed < 0
    at = np.where(free, 0, fixed)
    room = np.where(free, caps.max(axis=1, keepdims=True), caps[:, at])
    fits = (num_bytes <= room).all(axis=0)
    return Problem(
        unit_ptr=unit_ptr,
        option_unit=np.repeat(np.arange(unit_ptr.size - 1), np.diff(unit_ptr)),
        mode=mode,
        shard_ptr=shard_ptr,
        perf=perf,
        bytes=num_bytes,
        fixed_rank=fixed,
        option_perf=np.add.reduceat(perf, starts),
        option_max=np.maximum.reduceat(perf, starts),
        option_bytes=np.add.reduceat(num_bytes, starts, axis=1),
        possible=np.logical_and.reduceat(fits, starts),
        caps=caps,
        local_world_size=topology.local_world_size,
        members=members,
    )


# --------------------------------------------------------------------------------------------------- lower bound


@dataclass(frozen=True)
class Bound:
    """A lower bound: the busiest rank of any plan has at least ``value`` ms. ``prices`` [M], in ms per byte in each tier,
    give it."""

    value: float
    prices: tuple[float, ...]


def cheapest(problem: Problem, limit: float, prices: Sequence[float]) -> tuple[FloatN, FloatN]:
    """(cost [O] with infinity for barred options, least cost per unit [U]) among options with no shard above ``limit``."""
    cost = problem.option_perf
    for price, num_bytes in zip(prices, problem.option_bytes):
        if price:
            cost = cost + price * num_bytes
    cost = np.where(problem.possible & (problem.option_max <= limit), cost, np.inf)
    return cost, np.minimum.reduceat(cost, problem.unit_ptr[:-1])


def lower_bound(problem: Problem) -> Bound:
    """The largest Lagrangian bound: the least z such that options with no shard above z, priced for memory, sum to W z.

    For any z a plan with its largest rank at z uses only options whose shards are at most z, and its loads sum to at
    most W z; charging memory by any price lowers the sum by no more than price x capacity (Lagrangian relaxation). So
    the least z that passes is a bound, for any prices; the prices are chosen to make the bound large. The bound is at
    least both of (sum of cheapest options / W) and (the largest unavoidable shard).
    """
    caps = problem.caps.sum(axis=1).tolist()
    free = (0.0,) * len(caps)
    steps = np.unique(problem.option_max[problem.possible])
    if not steps.size:
        return Bound(float("inf"), free)

    def average(limit: float, prices: tuple[float, ...]) -> float:
        total = float(cheapest(problem, limit, prices)[1].sum())
        for price, cap in zip(prices, caps):
            total -= price * cap
        return total / problem.world_size

    def solve(prices: tuple[float, ...]) -> float:
        low, high = 0, steps.size - 1  # average() falls and the step rises: find where they cross
        while low < high:
            middle = (low + high) // 2
            if average(steps[middle], prices) <= steps[middle]:
                high = middle
            else:
                low = middle + 1
        at_step = max(float(steps[low]), average(steps[low], prices))
        before = average(steps[low - 1], prices) if low else float("inf")
        return min(at_step, before)

    value, best = solve(free), free
    if not np.isfinite(value):
        return Bound(value, best)
    counted = _counting_bound(problem)
    cost, least = cheapest(problem, value, best)
    chosen = first_of_least(problem, cost, least)
    for tier, used in enumerate(problem.option_bytes[:, chosen].sum(axis=1)):
        if used <= caps[tier]:
            continue
        scale = float(problem.option_perf[chosen].sum() / max(used, 1.0))
        # The bound is roughly concave in the logarithm of the price: scan coarsely, then finely around the best.
        grid = scale * np.logspace(-3, 4, 29)
        for _ in range(2):
            tried = []
            for price in grid:
                trial = (*best[:tier], float(price), *best[tier + 1 :])
                tried.append((solve(trial), trial))
            top = max(tried)
            if top[0] > value:
                value, best = top
            price = best[tier] or scale
            grid = price * np.logspace(-0.25, 0.25, 21)
    return Bound(max(value, counted), best)


def _counting_bound(problem: Problem) -> float:
    """A bound from whole shards: n units that each put a shard of at least s somewhere need ceil(n / W) on one rank.

    A unit may escape by a uniform option, which loads every rank instead; so for each s the cheapest number of escapes
    k is taken: min over k of ceil((n - k) / W) s + (the k least uniform loads). The largest over s counts.
    """
    p, world = problem, problem.world_size
    uniform = (p.mode == FIXED) & (np.diff(p.shard_ptr) >= world)
    starts, ptr = p.shard_ptr[:-1], p.unit_ptr[:-1]
    # Least load that a uniform option puts on every rank, and least of the largest shards of the other options.
    escape = np.minimum.reduceat(np.where(uniform & p.possible, np.minimum.reduceat(p.perf, starts), np.inf), ptr)
    other = np.minimum.reduceat(np.where(~uniform & p.possible, p.option_max, np.inf), ptr)
    needs = np.where(np.isfinite(other), other, escape)
    order = np.argsort(-needs, kind="stable")[: min(64 * world, 2_000)]
    best = 0.0
    for n in range(1, order.size + 1):
        s = float(needs[order[n - 1]])
        ways = np.sort(escape[order[:n]])
        escaped = np.concatenate([[0.0], np.cumsum(ways[np.isfinite(ways)])])
        left = np.ceil((n - np.arange(escaped.size)) / world)
        best = max(best, float((left * s + escaped).min()))
    return best


def first_of_least(problem: Problem, cost: FloatN, least: FloatN) -> IntN:
    """The first option of each unit that attains its least cost."""
    hits = np.flatnonzero(cost <= least[problem.option_unit])
    units = problem.option_unit[hits]
    first = np.concatenate([[True], units[1:] != units[:-1]])
    return hits[first]
