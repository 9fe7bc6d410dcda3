"""The default search: pick an option a unit near the lower bound, place greedily, then improve the best starts.

Everything is deterministic: work is bounded by counts, and the clock only cuts it short when ``deadline`` passes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from recinfer.distributed.planner.model.estimates import FloatN, IntN
from recinfer.distributed.planner.solve.annealing import anneal
from recinfer.distributed.planner.solve.exact import branch_and_bound, is_small
from recinfer.distributed.planner.solve.local_search import GOOD, LocalSearch
from recinfer.distributed.planner.solve.placing import Placement, Placer, packer, refresh
from recinfer.distributed.planner.solve.problem import FIXED, Bound, Problem, cheapest, first_of_least, lower_bound

__all__ = ["SearchReport", "search"]


_STARTS, _STARTS_BY_MEMORY = 3, 8
_ANNEALED = 3  # of the annealed placements, searched around
_FEW = 24  # tables
_FULL = 0.85  # share of a rank's memory above which a table moves only if others make room


@dataclass
class SearchReport:
    """How good the plan is, and what finding it took.

    ``gap`` has two parts: what the search missed, and how far the bound lies below the optimum. Where ``proven`` is true
    the search missed nothing, and all of the gap is the bound's.
    """

    max_perf: float  # ms on the busiest rank
    lower_bound: float  # ms; no plan is below it
    seconds: float = 0.0
    num_proposals: int = 0
    num_plans: int = 0
    moves: int = 0
    source: str = "search"
    proven: bool = False  # the plan is optimal: it is at the bound, or all others were tried or ruled out
    notes: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """max_perf / lower_bound: no plan is better by more than this; 1 is optimal."""
        return self.max_perf / self.lower_bound if self.lower_bound > 0 else 1.0


def search(
    problem: Problem,
    *,
    deadline: float = float("inf"),
    bound: Bound | None = None,
    max_moves: int = 20_000,
) -> tuple[Placement | None, SearchReport]:
    """The best placement found, or None when nothing fits; and the report.

    Args:
        deadline: ``time.monotonic()`` value after which the best so far is returned.
    """
    begin = time.monotonic()
    bound = bound or lower_bound(problem)
    report = SearchReport(float("inf"), bound.value)
    if not np.isfinite(bound.value):
        return None, report
    found = _Starts(problem, bound, deadline, report)
    found.around_memory_prices()
    found.near_bound()
    if not found.placed:
        found.row_wise_and_packed()
    local = LocalSearch(problem, found.placer, deadline, max_moves)
    best = _improved(found, local, memory_binds=any(bound.prices) and max_moves > 0)
    if max_moves:
        best = _unlocked(found, local, best)
    if best is None or (max_moves and best.worst > bound.value * GOOD):
        best, report.proven = branch_and_bound(problem, found.placer, best)
    if best is None:
        return None, report
    best = refresh(problem, best)
    report.proven |= best.worst <= bound.value * (1 + 1e-9)
    report.max_perf, report.moves = best.worst, local.moves
    report.seconds = time.monotonic() - begin
    return best, report


class _Starts:
    """Choices of an option a unit, each placed greedily: where the local search starts."""

    def __init__(self, problem: Problem, bound: Bound, deadline: float, report: SearchReport) -> None:
        self.problem, self.bound, self.deadline, self.report = problem, bound, deadline, report
        self.placer, self.packer = Placer(problem), packer(problem)
        self.placed: list[Placement] = []
        self._seen: set[bytes] = set()

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def consider(self, choice: IntN, cost: FloatN) -> bool:
        """Place a choice that is new; whether it fits."""
        key = choice.tobytes()
        if key in self._seen:
            return False
        self._seen.add(key)
        self.report.num_proposals += 1
        placed = self.placer.greedy(choice, cost)
        if placed is None:
            packed = self.packer.greedy(choice, cost)
            if packed is None:
                return False
            placed = refresh(self.problem, packed)
        self.report.num_plans += 1
        self.placed.append(placed)
        return True

    def around_memory_prices(self) -> None:
        """Where memory binds: choices around the price at which the sums just fit."""
        problem, prices = self.problem, self.bound.prices
        if not any(prices):
            return
        for scale in (0.8, 0.95, 1.0, 1.03, 1.07, 1.1, 1.15, 1.25, 1.5, 2.0, 3.0):
            cost, least = cheapest(problem, self.bound.value * 1.05, (prices[0] * scale, prices[1] * scale))
            if np.isfinite(least).all() and (time.monotonic() < self.deadline or not self.placed):
                self.consider(first_of_least(problem, cost, least), np.minimum(cost, problem.option_perf * 1e6))

    def near_bound(self) -> None:
        """Choices whose units are all below a multiple of the bound, a larger multiple each time."""
        for factor in (1.0, 1.01, 1.03, 1.1, 1.3, 2.0, np.inf):
            if self.late() and self.placed:
                return
            self._first_that_fits(self.bound.value * factor)
            if self.placed and min(s.worst for s in self.placed) <= self.bound.value * GOOD:
                return

    def row_wise_and_packed(self) -> None:
        """The k largest units cut over all ranks, the rest packed by size: the first k of 0, 1, 2 ... that fits.

        Above 32, k grows by some percent: one table more or less of many is cut.
        """
        p = self.problem
        size = np.where(p.possible, self.packer.problem.option_perf, np.inf)
        everywhere = (p.mode == FIXED) & (np.diff(p.shard_ptr) == p.world_size)
        least, cut = (
            np.minimum.reduceat(np.where(allowed, size, np.inf), p.unit_ptr[:-1]) for allowed in (True, everywhere)
        )
        if not np.isfinite(least).all():
            return
        smallest = first_of_least(p, size, least)
        cost = np.where(everywhere, size, np.inf)
        rows = smallest.copy()
        can = np.isfinite(cut)
        if can.any():
            rows[can] = first_of_least(p, cost, np.where(can, cut, -np.inf))
        order = np.argsort(-least, kind="stable")
        few = min(p.num_units, 32)
        for k in [*range(few), *np.unique(np.geomspace(few, p.num_units, 48).astype(int))]:
            choice = smallest.copy()
            choice[order[:k]] = rows[order[:k]]
            if self.consider(choice, size):
                return

    def _first_that_fits(self, limit: float) -> None:
        problem = self.problem
        for prices in _price_ladder(problem, self.bound):
            cost, least = cheapest(problem, limit, prices)
            if not np.isfinite(least).all():
                return
            choice = first_of_least(problem, cost, least)
            known = choice.tobytes() in self._seen
            if self.consider(choice, np.where(np.isfinite(cost), cost, problem.option_perf * 1e6)) or known:
                return
            if self.late():
                return


def _improved(found: _Starts, local: LocalSearch, *, memory_binds: bool) -> Placement | None:
    """The best of the best starts, searched around; None without a start."""
    good = found.bound.value * GOOD
    # Where memory binds, what a start is worth shows only after its search: a balanced one may hold the wrong replicas.
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


def _unlocked(found: _Starts, local: LocalSearch, best: Placement | None) -> Placement | None:
    """A placement no worse than ``best``, where no single move helps: annealed, or else shaken and searched again.

    Annealed are problems of few tables, and of full memory; those that are searched exactly after this are not.
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
    """Share of its memory that the fullest rank uses."""
    pairs = ((at.hbm, problem.hbm_cap), (at.ddr, problem.ddr_cap))
    return max(float((used / np.maximum(cap, 1.0)).max()) for used, cap in pairs)


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
