"""The default search: pick an option per unit near the lower bound, place greedily, then improve the best starts.

Everything is deterministic: work is bounded by counts, and the clock only cuts it short when ``deadline`` passes.
"""

from __future__ import annotations

import time

import numpy as np

from recinfer.distributed.planner.solve.annealing import anneal
from recinfer.distributed.planner.solve.exact import branch_and_bound, is_small
from recinfer.distributed.planner.solve.local_search import GOOD, LocalSearch
from recinfer.distributed.planner.solve.placing import Placement, refresh
from recinfer.distributed.planner.solve.problem import Problem, lower_bound
from recinfer.distributed.planner.solve.search_report import SearchReport
from recinfer.distributed.planner.solve.starts import Starts

__all__ = ["search"]

_STARTS, _STARTS_BY_MEMORY = 3, 8
_ANNEALED = 3  # annealed placements from which a local search starts
_FEW = 24  # tables
_FULL = 0.85  # share of a rank's memory above which a table can move only if others move too


def search(
    problem: Problem,
    *,
    deadline: float = float("inf"),
    max_moves: int = 20_000,
) -> tuple[Placement | None, SearchReport]:
    """The best placement found, or None if no placement fits; and the report.

    Args:
        deadline: ``time.monotonic()`` value after which the best so far is returned.
    """
    begin = time.monotonic()
    bound = lower_bound(problem)
    report = SearchReport(float("inf"), bound.value)
    if not np.isfinite(bound.value):
        return None, report
    found = Starts(problem, bound, deadline, report)
    found.around_memory_prices()
    found.near_bound()
    if not found.placed:
        found.row_wise_and_packed()
    local = LocalSearch(problem, found.placer, deadline, max_moves)
    best = _improved(found, local, memory_binds=any(bound.prices) and max_moves > 0)
    if max_moves:
        best = _escaped(found, local, best)
    if best is None or (max_moves and best.worst > bound.value * GOOD):
        best, report.proven = branch_and_bound(problem, found.placer, best)
    if best is None:
        return None, report
    best = refresh(problem, best)
    report.proven |= best.worst <= bound.value * (1 + 1e-9)
    report.max_perf, report.moves = best.worst, local.moves
    report.seconds = time.monotonic() - begin
    return best, report


def _improved(found: Starts, local: LocalSearch, *, memory_binds: bool) -> Placement | None:
    """The best placement that the local search finds from the best starts; None without a start."""
    good = found.bound.value * GOOD
    # When memory is the limit, a start can be judged only after its search: a balanced one may have the wrong replicas.
    seeds = sorted(found.placed, key=lambda s: s.worst)[: _STARTS_BY_MEMORY if memory_binds else _STARTS]
    best = min(seeds, key=lambda s: s.worst, default=None)
    for seed in seeds:
        improved = seed.copy()
        for _ in range(2 if memory_binds else 1):
            before = improved.copy()
            if memory_binds:
                improved = local.spend_memory(improved)
            improved = local.run(improved, found.bound.value)
            if improved.worst > before.worst:
                improved = before
        if best is None or improved.worst < best.worst:
            best = improved
        if best.worst <= good or found.late():
            break
    return best


def _escaped(found: Starts, local: LocalSearch, best: Placement | None) -> Placement | None:
    """A placement no worse than ``best``, by annealing, or by perturbing it and searching again.

    Annealing is for problems with few tables or full memory, except problems that are later searched exactly.
    """
    problem, bound = found.problem, found.bound.value
    if best is not None and (best.worst <= bound * GOOD or is_small(problem)):
        return local.shake(best, bound)
    if best is None or problem.num_units <= _FEW or _fullest(problem, best) > _FULL:
        annealed = anneal(problem, found.placer, local.alternatives, bound, found.deadline)[:_ANNEALED]
        if annealed:
            tried = [local.run(placement, bound) for placement in annealed]
            return min(tried if best is None else [best, *tried], key=lambda placement: placement.worst)
    return None if best is None else local.shake(best, bound)


def _fullest(problem: Problem, at: Placement) -> float:
    """Share of memory in use on the fullest rank."""
    return float((at.used / np.maximum(problem.caps, 1.0)).max())
