"""Starts of the local search: choices of an option per unit, each placed greedily."""

from __future__ import annotations

import time

import numpy as np

from recinfer.distributed.planner.model.estimates import FloatN, IntN
from recinfer.distributed.planner.solve.local_search import GOOD
from recinfer.distributed.planner.solve.placing import Placement, Placer, packer, refresh
from recinfer.distributed.planner.solve.problem import FIXED, Bound, Problem, cheapest, first_of_least
from recinfer.distributed.planner.solve.search_report import SearchReport

__all__ = ["Starts"]


class Starts:
    """Collects starts of the local search: choices of an option per unit, each placed greedily."""

    def __init__(self, problem: Problem, bound: Bound, deadline: float, report: SearchReport) -> None:
        self.problem = problem
        self.bound = bound
        self.deadline = deadline
        self.report = report
        self.placer = Placer(problem)
        self.packer = packer(problem)
        self.placed: list[Placement] = []
        self._seen: set[bytes] = set()

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def consider(self, choice: IntN, cost: FloatN) -> bool:
        """Place a choice if it is new; returns whether it fits."""
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
        """Consider choices around the memory price at which the sums just fit, for problems where memory is the
        limit."""
        problem, prices = self.problem, self.bound.prices
        if not any(prices):
            return
        for scale in (0.8, 0.95, 1.0, 1.03, 1.07, 1.1, 1.15, 1.25, 1.5, 2.0, 3.0):
            cost, least = cheapest(problem, self.bound.value * 1.05, [price * scale for price in prices])
            if np.isfinite(least).all() and (time.monotonic() < self.deadline or not self.placed):
                self.consider(first_of_least(problem, cost, least), np.minimum(cost, problem.option_perf * 1e6))

    def near_bound(self) -> None:
        """Consider choices whose units are all below a multiple of the bound, for growing multiples."""
        for factor in (1.0, 1.01, 1.03, 1.1, 1.3, 2.0, np.inf):
            if self.late() and self.placed:
                return
            self._first_that_fits(self.bound.value * factor)
            if self.placed and min(s.worst for s in self.placed) <= self.bound.value * GOOD:
                return

    def row_wise_and_packed(self) -> None:
        """Consider the choice with the k largest units cut over all ranks and the rest packed by size, for the first k
        of 0, 1, 2 ... that fits. Above 32, k grows by some percent, since a few more cut tables of many matter little.
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


def _price_ladder(problem: Problem, bound: Bound) -> list[tuple[float, ...]]:
    """Prices of memory to try in turn when a choice does not fit: the bound's, then higher ones of the first tiers."""
    perf = float(np.median(problem.option_perf))
    units = [perf / max(float(np.median(num_bytes)), 1.0) for num_bytes in problem.option_bytes]
    ladder = [bound.prices]
    for factor in np.logspace(-3, 5, 17).tolist():
        prices = bound.prices
        for tier, unit in enumerate(units):
            prices = (*prices[:tier], prices[tier] + factor * unit, *prices[tier + 1 :])
            ladder.append(prices)
    return ladder
