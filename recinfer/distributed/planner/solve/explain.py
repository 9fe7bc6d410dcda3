"""Explains why no plan fits: the limiting memory, the missing bytes, the tables, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recinfer.distributed.planner.model.constraints import PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.estimates import Estimate
from recinfer.distributed.planner.model.facts import TableFacts
from recinfer.distributed.planner.model.topology import CustomTopologyData, Topology, tier_bytes
from recinfer.distributed.planner.plan.table_plan import TablePlan
from recinfer.distributed.planner.solve.outcome import pin_tables
from recinfer.distributed.planner.solve.placing import Placer
from recinfer.distributed.planner.solve.problem import Problem, make_problem
from recinfer.distributed.planner.solve.search import search
from recinfer.distributed.planner.solve.space import SearchSpace, build_space, option_label
from recinfer.distributed.types.kernels import KERNEL_RULES
from recinfer.distributed.types.tiers import TIER_NAMES, TIERS, Tier
from recinfer.sizes import exact_size, round_up_to_printed

__all__ = ["error_type", "explain"]

_MAX_SHARDS = 400_000  # above this, changes that need a new search space are not tried


def error_type(problem: Problem) -> PlannerErrorType:
    """The error type when no plan fits, as in TorchRec.

    INSUFFICIENT_STORAGE: the memory of all ranks together is below the tables' least need. STRICT_CONSTRAINTS: the
    memory suffices, but the pieces that the constraints and sharders allow do not fit the single ranks.
    """
    p = problem
    needs = zip((*p.option_bytes, p.option_bytes.sum(axis=0)), (*p.caps, p.caps.sum(axis=0)))
    short = any(np.minimum.reduceat(used, p.unit_ptr[:-1]).sum() > cap.sum() for used, cap in needs)
    return PlannerErrorType.INSUFFICIENT_STORAGE if short else PlannerErrorType.STRICT_CONSTRAINTS


def explain(
    space: SearchSpace,
    problem: Problem,
    topology: Topology,
    estimator: Callable[[Topology], Estimate],
    *,
    pinned: Sequence[TablePlan] = (),
    smaller_tables: Sequence[TableFacts] | None = None,
) -> str:
    """The message of the error, in two lines. Each advised change was verified by planning with it, including pins.

    Args:
        estimator: returns the estimate function for another topology, to try more ranks.
        pinned: entries of an earlier plan that keep their places.
        smaller_tables: the tables in the next smaller precision, to try as a change.
    """
    binds, tier = _limiting_memory(space, problem)
    helps = _helpful_changes(_Trial(topology, estimator, pinned), space, smaller_tables, tier)
    advice = "; ".join(helps) if helps else "no single change of ranks, capacity, precision or kernel is enough"
    return f"No plan fits. {binds}\nWhat would help: {advice}."


def _limiting_memory(space: SearchSpace, problem: Problem) -> tuple[str, int]:
    """A sentence about the limiting tier, and the number of that tier."""
    p = problem
    unit_possible = np.logical_or.reduceat(p.possible, p.unit_ptr[:-1])
    if not unit_possible.all():
        return _single_shard(space, p, np.flatnonzero(~unit_possible))
    for tier, name in enumerate(TIER_NAMES):
        least = np.minimum.reduceat(np.where(p.possible, p.option_bytes[tier], np.inf), p.unit_ptr[:-1])
        short = least.sum() - p.caps[tier].sum()
        if short > 0:
            tables = ", ".join(_unit_name(space, p, int(u)) for u in np.argsort(-least, kind="stable")[:3])
            text = (
                f"All tables together need at least {exact_size(least.sum())} of {name}; the {p.world_size} "
                f"ranks have {exact_size(p.caps[tier].sum())} after the reservation: {int(short)} bytes short. Largest: "
                f"{tables}."
            )
            return text, tier
    least = np.minimum.reduceat(np.where(p.possible, p.option_bytes.sum(axis=0), np.inf), p.unit_ptr[:-1])
    have = p.caps.sum()
    if least.sum() > have:
        tables = ", ".join(_unit_name(space, p, int(u)) for u in np.argsort(-least, kind="stable")[:3])
        text = (
            f"All tables together need at least {exact_size(least.sum())} of {' and '.join(TIER_NAMES)}; the "
            f"{p.world_size} ranks have {exact_size(have)} in all after the reservation: {int(least.sum() - have)} bytes "
            f"short. Largest: {tables}."
        )
        return text, 0
    return _packing(space, p)


def _single_shard(space: SearchSpace, p: Problem, units: np.ndarray) -> tuple[str, int]:
    best: tuple[float, int, int, int, int] | None = None  # excess, unit, option, tier, shard
    for unit in units:
        per_option: list[tuple[float, int, int, int, int]] = []
        for option in range(int(p.unit_ptr[unit]), int(p.unit_ptr[unit + 1])):
            s = p.shards_of(option)
            fixed = p.fixed_rank[s]
            worst: list[tuple[float, int, int]] = []
            for tier, (used, cap) in enumerate(zip(p.bytes, p.caps)):
                room = np.where(fixed < 0, cap.max(), cap[np.maximum(fixed, 0)])
                over = used[s] - room
                worst.append((float(over.max()), tier, int(over.argmax())))
            top = max(worst)
            per_option.append((top[0], int(unit), option, top[1], top[2]))
        least = min(per_option)
        if best is None or least[0] > best[0]:
            best = least
    assert best is not None
    excess, unit, option, tier, shard = best
    used, cap = p.bytes[tier], p.caps[tier]
    s = p.shards_of(option)
    rank = int(p.fixed_rank[s][shard])
    rank = rank if rank >= 0 else int(cap.argmax())
    names = ", ".join(_unit_name(space, p, int(u)) for u in units[:5])
    text = (
        f"{len(units)} table(s) have no option whose pieces fit an empty rank ({names}). The closest is a "
        f"{'/'.join(option_label(space, p.space_options(option)[0]))} piece of {_unit_name(space, p, unit)}, which "
        f"needs {exact_size(used[s][shard])} of {TIER_NAMES[tier]}; rank {rank} has {exact_size(cap[rank])} after the "
        f"reservation: {int(excess)} bytes short."
    )
    return text, tier


def _packing(space: SearchSpace, p: Problem) -> tuple[str, int]:
    """Explain pieces that do not fit though their sum does: place with unlimited capacities and report the largest
    overflow."""
    largest = p.caps.max(axis=1)
    bytes_of = (p.option_bytes / np.maximum(largest, 1.0)[:, None]).sum(axis=0)
    cost = np.where(p.possible, bytes_of, np.inf)
    choice = np.array([p.unit_ptr[u] + cost[p.unit_ptr[u] : p.unit_ptr[u + 1]].argmin() for u in range(p.num_units)])
    nearest = int((largest > 0).argmax())
    opened = replace(p, perf=p.bytes[nearest], caps=np.full_like(p.caps, np.inf))
    at = Placer(opened).greedy(choice, cost)
    assert at is not None
    over = at.used - p.caps
    tier, rank = (int(x) for x in np.unravel_index(int(over.argmax()), over.shape))
    here = [u for u in range(p.num_units) if (at.ranks[u] == rank).any()]
    here.sort(key=lambda u: -float(p.option_bytes[tier, choice[u]]))
    names = ", ".join(_unit_name(space, p, u) for u in here[:5])
    text = (
        f"All tables together would fit, but their pieces cannot be placed: {TIER_NAMES[tier]} of rank {rank} "
        f"({exact_size(p.caps[tier, rank])}) overflows by {int(max(over[tier, rank], 0))} bytes in the best packing by size, "
        f"with {names}."
    )
    return text, tier


def _unit_name(space: SearchSpace, p: Problem, unit: int) -> str:
    options = p.space_options(int(p.unit_ptr[unit]))
    return "+".join(space.tables[int(space.option_table[o])].fqn.lstrip(".") for o in options)


# --------------------------------------------------------------------------------------------------- what helps


@dataclass(frozen=True)
class _Trial:
    """Plans the same tables and pins with one change."""

    topology: Topology
    estimator: Callable[[Topology], Estimate]
    pinned: Sequence[TablePlan]

    def fits(self, tables: Sequence[TableFacts], topology: Topology) -> bool:
        """Whether the search finds a plan of ``tables`` on ``topology``."""
        return self.space_fits(build_space(tables, topology, self.estimator(topology)), topology)

    def space_fits(self, space: SearchSpace, topology: Topology) -> bool:
        """Whether the search finds a plan of the options of ``space`` on ``topology``."""
        try:
            pins = pin_tables(space, self.pinned, topology)
        except PlannerError:  # the pinned pieces are not among these options
            return False
        return search(make_problem(space, topology, pins), max_moves=0)[0] is not None


def _helpful_changes(
    trial: _Trial, space: SearchSpace, smaller_tables: Sequence[TableFacts] | None, tier: int
) -> list[str]:
    helps, topology = [], trial.topology
    if (cap := _capacity(trial, space, tier)) is not None:
        helps.append(f"{exact_size(cap)} of {TIER_NAMES[tier]} per rank after the reservation")
    if space.shard_option.size > _MAX_SHARDS:
        return helps
    if (ranks := _ranks(trial, space)) is not None:
        helps.append(f"{ranks} ranks instead of {topology.world_size}")
    if smaller_tables is not None and trial.fits(smaller_tables, topology):
        helps.append(f"precision {smaller_tables[0].precision} instead of {space.tables[0].precision}")
    for further in TIERS:
        wider = _with_tier(space.tables, topology, further)
        if wider is not None and trial.fits(wider, topology):
            kernels = dict.fromkeys(k for w, t in zip(wider, space.tables) for _, k in w.offers[len(t.offers) :])
            helps.append(f"kernels that keep rows in {further.memory} ({', '.join(kernels)})")
    types = _with_row_wise(space.tables)
    if types is not None and trial.fits(types, topology):
        helps.append("row_wise among the sharding types of the tables above")
    return helps


def _resized(topology: Topology, world_size: int, caps: list[list[int]]) -> Topology:
    """A topology with other ranks, ``caps`` [M, W] their bytes in each tier."""
    bandwidths: dict[str, Any] = {f"{tier.name}_mem_bw": topology.tier_bandwidth(tier) for tier in TIERS}
    local = topology.local_world_size if world_size % topology.local_world_size == 0 else world_size
    return Topology(
        world_size=world_size,
        compute_device=topology.compute_device,
        local_world_size=local,
        hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
        generalized_comms_bandwidths=topology.comms_bandwidths,
        custom_topology_data=CustomTopologyData(
            {f"{name}_cap": cap for name, cap in zip(TIER_NAMES, caps)}, world_size
        ),
        hardware=topology.hardware,
        **bandwidths,
    )


def _capacity(trial: _Trial, space: SearchSpace, tier: int) -> float | None:
    """Least bytes per rank of the binding tier at which a plan is found, all ranks alike; to within 1 %.

    The figure is rounded up to the printed precision, so that the printed capacity is enough.
    """
    topology = trial.topology
    caps = _capacities(topology)

    def fits(cap: float) -> bool:
        tried = [list(c) for c in caps]
        tried[tier] = [int(cap)] * topology.world_size
        other = _resized(topology, topology.world_size, tried)
        if not unequal:
            return trial.space_fits(space, other)
        # Pieces in proportion to the ranks' memory change with the memory, so the search space is built again.
        return space.shard_option.size <= _MAX_SHARDS and trial.fits(space.tables, other)

    unequal = any(len(set(cap)) > 1 for cap in caps)
    low, high = float(max(min(caps[tier]), 1)), float(max(max(caps[tier]), int(space.bytes[tier].max()), 1024))
    for _ in range(12):
        if fits(high):
            break
        low, high = high, high * 2
    else:
        return None
    while high > low * 1.01:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    printed = round_up_to_printed(high)
    return float(printed if fits(printed) else int(high))


def _capacities(topology: Topology) -> list[list[int]]:
    """Bytes [M, W] of each rank in each tier."""
    return [list(caps) for caps in zip(*(tier_bytes(d.storage) for d in topology.devices))]


def _ranks(trial: _Trial, space: SearchSpace) -> int | None:
    """Least number of ranks like the smallest of these, in whole hosts, at which a plan is found."""
    topology = trial.topology
    least = [min(cap) for cap in _capacities(topology)]
    step = topology.local_world_size if topology.local_world_size < topology.world_size else 1

    def fits(steps: int) -> bool:
        world = steps * step
        return trial.fits(space.tables, _resized(topology, world, [[cap] * world for cap in least]))

    low = topology.world_size // step
    high = low
    for _ in range(6):
        high *= 2
        if fits(high):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * step


def _with_tier(tables: Sequence[TableFacts], topology: Topology, tier: Tier) -> list[TableFacts] | None:
    """The tables, each also offered with the kernels whose rows are in ``tier``; None if no option is new."""
    there = [rule for rule in KERNEL_RULES if rule.tier == tier and topology.compute_device in rule.devices]
    from_own = {r.kernel.value: r.packed for r in KERNEL_RULES if r.tier is None and not r.dense}
    wider = []
    for t in tables:
        pairs = [(s, r.kernel.value) for s, k in t.offers if k in from_own for r in there if r.packed == from_own[k]]
        wider.append(replace(t, offers=(*t.offers, *(o for o in pairs if o not in t.offers))))
    return wider if any(len(w.offers) > len(t.offers) for w, t in zip(wider, tables)) else None


def _with_row_wise(tables: Sequence[TableFacts]) -> list[TableFacts] | None:
    """The tables, each also offered row-wise with its kernels; None if no option is new."""
    wider = []
    for t in tables:
        kernels = dict.fromkeys(k for _, k in t.offers if k != "dense")
        more = [("row_wise", k) for k in kernels]
        wider.append(replace(t, offers=(*t.offers, *(o for o in more if o not in t.offers))))
    return wider if any(len(w.offers) > len(t.offers) for w, t in zip(wider, tables)) else None
