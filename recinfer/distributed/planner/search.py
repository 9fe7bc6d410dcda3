"""The default search: pick an option a unit near the lower bound, place greedily, then improve the best starts.

Everything is deterministic: work is bounded by counts, and the clock only cuts it short when ``deadline`` passes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from recinfer.distributed.planner.estimates import FloatN, IntN
from recinfer.distributed.planner.exact import branch_and_bound
from recinfer.distributed.planner.local_search import GOOD, LocalSearch
from recinfer.distributed.planner.placing import Placement, Placer, refresh
from recinfer.distributed.planner.problem import Bound, Problem, cheapest, first_of_least, lower_bound

__all__ = ["SearchReport", "search"]


_STARTS_BY_MEMORY = 8


@dataclass
class SearchReport:
    """How good the plan is, and what finding it took."""

    max_perf: float  # ms on the busiest rank
    lower_bound: float  # ms; no plan is below it
    seconds: float = 0.0
    num_proposals: int = 0
    num_plans: int = 0
    moves: int = 0
    source: str = "search"
    notes: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """max_perf / lower_bound; 1 is optimal."""
        return self.max_perf / self.lower_bound if self.lower_bound > 0 else 1.0


def search(
    problem: Problem,
    *,
    deadline: float = float("inf"),
    bound: Bound | None = None,
    starts: list[IntN] | None = None,
    max_moves: int = 20_000,
) -> tuple[Placement | None, SearchReport]:
    """The best placement found, or None when nothing fits; and the report.

    Args:
        deadline: ``time.monotonic()`` value after which the best so far is returned.
        starts: further choices of options to start from (of proposers).
    """
    begin = time.monotonic()
    bound = bound or lower_bound(problem)
    report = SearchReport(float("inf"), bound.value)
    if not np.isfinite(bound.value):
        return None, report
    placer = Placer(problem)
    seeds: list[Placement] = []
    seen: set[bytes] = set()

    def consider(choice: IntN, cost: FloatN) -> bool:
        key = choice.tobytes()
        if key in seen:
            return False
        seen.add(key)
        report.num_proposals += 1
        placed = placer.greedy(choice, cost) or placer.greedy(choice, cost, by_memory=True)
        if placed is not None:
            report.num_plans += 1
            seeds.append(placed)
        return placed is not None

    for choice in starts or []:
        consider(choice, problem.option_perf)
    if any(bound.prices):  # memory binds: choices around the price at which the sums just fit
        for scale in (0.8, 0.95, 1.0, 1.03, 1.07, 1.1, 1.15, 1.25, 1.5, 2.0, 3.0):
            prices = (bound.prices[0] * scale, bound.prices[1] * scale)
            cost, least = cheapest(problem, bound.value * 1.05, prices)
            if np.isfinite(least).all() and (time.monotonic() < deadline or not seeds):
                consider(first_of_least(problem, cost, least), np.minimum(cost, problem.option_perf * 1e6))
    for factor in (1.0, 1.01, 1.03, 1.1, 1.3, 2.0, np.inf):
        if time.monotonic() > deadline and seeds:
            break
        for prices in _price_ladder(problem, bound):
            cost, least = cheapest(problem, bound.value * factor, prices)
            if not np.isfinite(least).all():
                break
            choice = first_of_least(problem, cost, least)
            known = choice.tobytes() in seen
            if consider(choice, np.where(np.isfinite(cost), cost, problem.option_perf * 1e6)) or known:
                break
            if time.monotonic() > deadline:
                break
        if seeds and min(s.worst for s in seeds) <= bound.value * GOOD:
            break
    if not seeds:
        return None, report
    local = LocalSearch(problem, placer, deadline, max_moves)
    seeds.sort(key=lambda s: s.worst)
    best = seeds[0]
    memory_binds = any(bound.prices) and max_moves > 0
    # Where memory binds, what a start is worth shows only after its search: a balanced one may hold the wrong replicas.
    for seed in seeds[: _STARTS_BY_MEMORY if memory_binds else 3]:
        improved = seed.copy()
        for _ in range(2 if memory_binds else 1):
            before = improved.copy()
            if memory_binds:
                improved = local.spend_memory(improved)
            improved = local.run(improved, bound.value)
            if improved.worst > before.worst:
                improved = before
        if improved.worst < best.worst:
            best = improved
        if best.worst <= bound.value * GOOD or time.monotonic() > deadline:
            break
    if max_moves:
        best = local.shake(best, bound.value)
        if best.worst > bound.value * GOOD:
            best = branch_and_bound(problem, placer, best)
    best = refresh(problem, best)
    report.max_perf, report.moves = best.worst, local.moves
    report.seconds = time.monotonic() - begin
    return best, report


def _price_ladder(problem: Problem, bound: Bound) -> list[tuple[float, float]]:
    """Prices of memory to try in turn when a choice does not fit: those of the bound, then dearer ones."""
    perf = float(np.median(problem.option_perf))
    unit_h = perf / max(float(np.median(problem.option_hbm)), 1.0)
    unit_d = perf / max(float(np.median(problem.option_ddr)), 1.0)
    ladder = [bound.prices]
    for factor in np.logspace(-3, 5, 17):
        h, d = float(factor) * unit_h, float(factor) * unit_d
        ladder += [(bound.prices[0] + h, bound.prices[1]), (bound.prices[0] + h, bound.prices[1] + d)]
    return ladder
