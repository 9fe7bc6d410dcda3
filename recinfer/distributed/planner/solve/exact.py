"""Branch and bound for problems of a few tables, where a local search may end in a local optimum."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import numpy as np

from recinfer.distributed.planner.solve.placing import Placement, Placer
from recinfer.distributed.planner.solve.problem import FIXED, FREE, Problem

__all__ = ["MAX_UNITS", "branch_and_bound", "is_small"]

MAX_UNITS = 6
_MAX_NODES = 40_000
_MAX_PLACES = 400  # ways to place an option; options with more ways are left to the local search
# Total load, option, rank of each shard, load added to each rank, and bytes added at positions of the flat [M, W] bytes.
_Adds = tuple[tuple[int, float], ...]
_Place = tuple[float, int, tuple[int, ...], _Adds, _Adds]


def is_small(problem: Problem) -> bool:
    """Whether :func:`branch_and_bound` searches ``problem``, which has few units and no unit that must stay on one
    host."""
    return problem.num_units <= MAX_UNITS and all(int(mode) in (FREE, FIXED) for mode in problem.mode)


def branch_and_bound(problem: Problem, placer: Placer, best: Placement | None) -> tuple[Placement | None, bool]:
    """A placement no worse than ``best`` (None: no known placement), and whether the placement is proven optimal.

    A proof is missing if the tree has over ``_MAX_NODES`` nodes or an option has untried ways to be placed.

    Effort is counted in nodes, so that the same problem gives the same placement on every machine. Problems with more
    than ``MAX_UNITS`` units, or with options that must stay on a host, are returned unchanged.
    """
    if not is_small(problem):
        return best, False
    listed = [_places(problem, unit) for unit in range(problem.num_units)]
    places, whole = [of_unit for of_unit, _ in listed], all(whole for _, whole in listed)
    if not all(places):
        return best, False
    # Large units first: their choices cut most of the tree.
    order = sorted(range(problem.num_units), key=lambda unit: -places[unit][0][0])
    rest = [0.0] * (len(order) + 1)  # least load of the units still to be placed
    for i in range(len(order) - 1, -1, -1):
        rest[i] = rest[i + 1] + places[order[i]][0][0]
    world = problem.world_size
    caps = problem.caps.ravel().tolist()
    load, used = [0.0] * world, [0.0] * len(caps)
    chosen: list[_Place] = []
    found: list[_Place] = []
    limit, nodes = (float("inf") if best is None else best.worst * (1 - 1e-9)), 0

    def go(i: int, total: float) -> None:
        nonlocal limit, nodes, found
        if i == len(order):
            limit, found = max(load) * (1 - 1e-9), list(chosen)
            return
        for place in places[order[i]]:
            nodes += 1
            if nodes > _MAX_NODES or (total + place[0] + rest[i + 1]) / world >= limit:
                return  # places are sorted by cost, so the others cost no less
            loads, sizes = place[3:]
            if all(load[r] + p < limit for r, p in loads) and all(used[at] + b <= caps[at] for at, b in sizes):
                for r, p in loads:
                    load[r] += p
                for at, b in sizes:
                    used[at] += b
                chosen.append(place)
                go(i + 1, total + place[0])
                chosen.pop()
                for r, p in loads:
                    load[r] -= p
                for at, b in sizes:
                    used[at] -= b

    go(0, 0.0)
    whole = whole and nodes <= _MAX_NODES
    if not found:
        return best, whole
    at = placer.empty()
    for unit, (_, option, ranks, _, _) in zip(order, found):
        placer.put(at, unit, option, np.array(ranks, dtype=np.int64))
    return at, whole


def _places(problem: Problem, unit: int) -> tuple[list[_Place], bool]:
    """The places of a unit, cheapest first; and whether these are all places."""
    found: list[_Place] = []
    whole = True
    for option in range(int(problem.unit_ptr[unit]), int(problem.unit_ptr[unit + 1])):
        if not problem.possible[option]:
            continue
        s = problem.shards_of(option)
        shards = list(zip(problem.perf[s].tolist(), *problem.bytes[:, s].tolist()))
        if problem.mode[option] == FIXED:
            ways = [tuple(problem.fixed_rank[s].tolist())]
        elif len(set(shards)) == 1:
            ways = list(combinations_with_replacement(range(problem.world_size), len(shards)))
        elif problem.world_size ** len(shards) <= _MAX_PLACES:
            ways = list(product(range(problem.world_size), repeat=len(shards)))
        else:
            ways = []
        if not 0 < len(ways) <= _MAX_PLACES:
            whole = False
            continue
        total = sum(perf for perf, *_ in shards)
        for ranks in ways:
            loads: dict[int, float] = {}
            sizes: dict[int, float] = {}
            for rank, (perf, *num_bytes) in zip(ranks, shards):
                loads[rank] = loads.get(rank, 0.0) + perf
                for at, amount in zip(range(rank, problem.caps.size, problem.world_size), num_bytes):
                    if amount:
                        sizes[at] = sizes.get(at, 0.0) + amount
            found.append((total, option, ranks, tuple(loads.items()), tuple(sizes.items())))
    found.sort(key=lambda place: (place[0], place[1], place[2]))
    return found, whole
