"""The default search: pick an option per unit near the lower bound, place greedily, then improve the best starts.

Everything is deterministic: work is bounded by counts, and the clock only cuts it short when ``deadline`` passes.
"""

from __future__ import annotations

import time

import numpy as np

from recinfer.distributed.planner.solve.annealing import anneal
from recinfer.distributed.planner.solve.local_search import GOOD, LocalSearch
from recinfer.distributed.planner.solve.placing import Placement, refresh
from recinfer.distributed.planner.solve.problem import Problem, lower_bound
from recinfer.distributed.planner.solve.search_report import SearchReport
from recinfer.distributed.planner.solve.starts import Starts

__all__ = ["search"]

_STARTS = 8
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
    best = _improved(found, local)
    if max_moves:
        best = _escaped(found, local, best)
    if best is None:
        return None, report
    best = refresh(problem, best)
    report.max_perf, report.moves = best.worst, local.moves
    report.seconds = time.monotonic() - begin
    return best, report


def _improved(found: Starts, local: LocalSearch) -> Placement | None:
    """The best placement that the local search finds from the best starts; None without a start."""
    best: Placement | None = None
    # A start can be judged only after its search: where memory is the limit, a balanced one may have the wrong replicas.
    for seed in sorted(found.placed, key=lambda start: start.worst)[:_STARTS]:
        improved = local.run(seed, found.bound.value)
        if best is None or improved.worst < best.worst:
            best = improved
        if best.worst <= found.bound.value * GOOD or found.late():
            break
    return best


def _escaped(found: Starts, local: LocalSearch, best: Placement | None) -> Placement | None:
    """A placement no worse than ``best``, by annealing, or by perturbing it and searching again.

    Annealing is for problems with few tables or full memory.
    """
    problem, bound = found.problem, found.bound.value
    if best is not None and best.worst <= bound * GOOD:
        return best
    if best is None or problem.num_units <= _FEW or _fullest(problem, best) > _FULL:
        annealed = anneal(problem, found.placer, local.alternatives, bound, found.deadline)[:_ANNEALED]
        if annealed:
            tried = [local.run(placement, bound) for placement in annealed]
            return min(tried if best is None else [best, *tried], key=lambda placement: placement.worst)
    return None if best is None else local.shake(best, bound)


def _fullest(problem: Problem, at: Placement) -> float:
    """Share of memory in use on the fullest rank."""
    return float((at.used / np.maximum(problem.caps, 1.0)).max())
