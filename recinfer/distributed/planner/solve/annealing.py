"""Simulated annealing of many placements at once, for small problems with nearly full memory, where single moves cannot
improve.

When memory is nearly full, a table can move only if others move too. Capacities are therefore soft: a placement may
exceed them at a price, which rises until no placement does. Annealing also finds a first placement when no greedy start
fits.

Legend: C placements, U units, W ranks, A places (an option of a unit on certain ranks), K = W loads and W
fills of each tier in use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from recinfer.distributed.planner.model.estimates import FloatN, IntN
from recinfer.distributed.planner.solve.placing import Placement, Placer
from recinfer.distributed.planner.solve.problem import FIXED, FREE, HOST, HOST_FREE, Problem

__all__ = ["anneal"]

_MAX_UNITS, _MAX_FIGURES = 64, 1_000_000  # problems with more units or figures of places are left to the local search
_PLACEMENTS = 192  # placements that are annealed together
_STEPS_A_UNIT, _MIN_STEPS = 50, 1000
_TURN = 50  # steps between two selections, in which the best eighth replaces the worst
_HOT, _COLD = 0.5, 0.005  # accepted rise of the busiest rank at first and at last, in mean loads of a unit
_CHEAP, _DEAR = 0.3, 1e4  # price of an overflow of a rank's whole memory, in multiples of the bound
_MAX_WAYS = 150  # ways to place several equal shards, if all are tried


@dataclass(frozen=True)
class _Places:
    """Every place (an option and the ranks of its shards) of every unit, sorted by unit and option."""

    adds: FloatN  # [K, A] additions to each rank: load over the bound, then shares of the memories
    option: IntN  # [A]
    ranks: list[IntN]  # [A]
    group: IntN  # [A] number of the place's group, the places of one option
    first: IntN
    count: IntN
    unit_first: IntN  # [U] first group and number of groups of each unit
    unit_count: IntN

    def draw(self, units: IntN, random: np.random.Generator) -> IntN:
        """A random place of each unit; the options of a unit are equally likely."""
        group = self.unit_first[units] + (random.random(units.shape) * self.unit_count[units]).astype(np.int64)
        return self.first[group] + (random.random(units.shape) * self.count[group]).astype(np.int64)

    def exchanged(self, a: IntN, b: IntN) -> tuple[IntN, IntN]:
        """Exchange the ranks of units ``a`` and ``b``, which keep their options; for single shards."""
        of_a, of_b = self.group[a], self.group[b]
        way_a, way_b = a - self.first[of_a], b - self.first[of_b]
        return self.first[of_a] + way_b % self.count[of_a], self.first[of_b] + way_a % self.count[of_b]


def _ways(problem: Problem, option: int) -> list[IntN]:
    """Ways to place the shards of ``option`` on ranks: all ways if there are few, else shards on successive ranks."""
    p, world, local = problem, problem.world_size, problem.local_world_size
    s = p.shards_of(option)
    index, mode = np.arange(s.stop - s.start), int(p.mode[option])
    if mode == FIXED:
        return [p.fixed_rank[s]]
    if mode == FREE:
        if comb(world + index.size - 1, index.size) <= _MAX_WAYS:
            return [np.array(ranks) for ranks in combinations_with_replacement(range(world), index.size)]
        return [(rank + index) % world for rank in range(world)]
    hosts = range(world // local)
    if mode in (HOST, HOST_FREE):
        return [host * local + index % local for host in hosts]
    return [(host + index // local) % len(hosts) * local + index % local for host in hosts]


def _places(problem: Problem, alternatives: list[IntN], bound: float) -> _Places | None:
    """All places, or None if there are too many."""
    p, world = problem, problem.world_size
    sizes = [(p.perf, np.full(world, bound))]
    sizes += [(used, np.maximum(cap, 1.0)) for used, cap in zip(p.bytes, p.caps) if used.any()]
    ways = [[_ways(p, int(o)) for o in options] for options in alternatives]
    total = sum(len(of_option) for of_unit in ways for of_option in of_unit)
    if total * len(sizes) * world > _MAX_FIGURES:
        return None
    adds = np.zeros((total, len(sizes), world))
    placed = [(int(o), way) for options, unit in zip(alternatives, ways) for o, of in zip(options, unit) for way in of]
    for at, (option, way) in enumerate(placed):
        s = p.shards_of(option)
        for k, (amount, whole) in enumerate(sizes):
            np.add.at(adds[at, k], way, amount[s] / whole[way])
    count = np.array([len(of_option) for of_unit in ways for of_option in of_unit])
    unit_count = np.array([len(of_unit) for of_unit in ways])
    return _Places(
        adds=np.ascontiguousarray(adds.reshape(total, -1).T),
        option=np.array([option for option, _ in placed]),
        ranks=[way for _, way in placed],
        group=np.repeat(np.arange(count.size), count),
        first=np.cumsum(count) - count,
        count=count,
        unit_first=np.cumsum(unit_count) - unit_count,
        unit_count=unit_count,
    )


def anneal(
    problem: Problem, placer: Placer, alternatives: list[IntN], bound: float, deadline: float
) -> list[Placement]:
    """Placements that fit, best first; empty if none was found or the problem is too large.

    The steps are counted, so that the same problem gives the same placements on every machine.

    Args:
        alternatives: options of each unit to choose from.
        bound: ms that the busiest rank has at least.
        deadline: ``time.monotonic()`` value after which no further turn begins.
    """
    places = _places(problem, alternatives, bound) if problem.num_units <= _MAX_UNITS and bound > 0 else None
    if places is None:
        return []
    random = np.random.default_rng(2)
    world, units = problem.world_size, problem.num_units
    lines = np.arange(_PLACEMENTS)
    at = places.draw(np.broadcast_to(np.arange(units)[:, None], (units, _PLACEMENTS)), random)  # [U, C] places
    steps = max(_STEPS_A_UNIT * units, _MIN_STEPS)
    for turn in range(0, steps, _TURN):
        if time.monotonic() > deadline:
            break
        one, other = random.integers(units, size=(2, _TURN, _PLACEMENTS))
        one_place, other_place = places.draw(one, random), places.draw(other, random)
        chance = random.exponential(size=(_TURN, _PLACEMENTS))
        figures = places.adds[:, at].sum(axis=1)  # [K, C] recomputed, because sums of many changes are not exact
        for i in range(_TURN):
            share = (turn + i) / steps
            heat = world / units * _HOT * (_COLD / _HOT) ** share
            price = _CHEAP * (_DEAR / _CHEAP) ** share
            if i == 0:
                cost = _cost(figures, world, price)
                order = np.argsort(cost, kind="stable")
                worst, best = order[-(_PLACEMENTS // 8) :], order[: _PLACEMENTS // 8]
                at[:, worst], figures[:, worst], cost[worst] = at[:, best], figures[:, best], cost[best]
            # Steps alternate between a new place for one unit, new places for two units, and an exchange of two units'
            # places.
            a, b = one[i], other[i]
            old_a, old_b = at[a, lines], at[b, lines]
            new_a, new_b = one_place[i], other_place[i]
            if i % 3 == 2:
                new_a, new_b = places.exchanged(old_a, old_b)
            new_b = np.where(a == b, old_b, new_b) if i % 3 else old_b
            after = figures + places.adds.take(new_a, axis=1)
            after -= places.adds.take(old_a, axis=1)
            if i % 3:
                after += places.adds.take(new_b, axis=1)
                after -= places.adds.take(old_b, axis=1)
            after_cost = _cost(after, world, price)
            taken = np.flatnonzero(after_cost - cost < heat * chance[i])
            figures[:, taken], cost[taken] = after[:, taken], after_cost[taken]
            at[b[taken], taken] = new_b[taken]
            at[a[taken], taken] = new_a[taken]  # written last, which counts if both are the same unit
    return _fitting_placements(problem, placer, places, at)


def _cost(figures: FloatN, world: int, price: float) -> FloatN:
    """Busiest rank over the bound, and ``price`` for the shares of the memories that overflow [C]."""
    return figures[:world].max(axis=0) + price * np.maximum(figures[world:] - 1, 0).sum(axis=0)


def _fitting_placements(problem: Problem, placer: Placer, places: _Places, at: IntN) -> list[Placement]:
    """The placements that fit, each once, best first."""
    found: list[Placement] = []
    for line in np.unique(at.T, axis=0):
        placed = placer.empty()
        for unit, place in enumerate(line.tolist()):
            placer.put(placed, unit, int(places.option[place]), places.ranks[place])
        if (placed.used <= problem.caps).all():
            found.append(placed)
    return sorted(found, key=lambda placement: placement.worst)
