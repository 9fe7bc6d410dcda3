"""Placement, which a search changes, and the greedy placer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recinfer.distributed.planner.model.estimates import FloatN, IntN
from recinfer.distributed.planner.solve.problem import FIXED, FREE, HOST, HOST_FREE, Problem

__all__ = ["Placement", "Placer", "packer", "refresh"]


@dataclass
class Placement:
    """One option per unit, one rank per shard, and the load and bytes of each rank."""

    choice: IntN  # [U]
    ranks: list[IntN]  # [U] -> rank of each shard of the chosen option
    perf: FloatN  # [W]
    used: FloatN  # [M, W] bytes in each tier

    @property
    def worst(self) -> float:
        """Load of the busiest rank, ms."""
        return float(self.perf.max())

    def copy(self) -> Placement:
        """An independent copy."""
        return Placement(self.choice.copy(), list(self.ranks), self.perf.copy(), self.used.copy())


class Placer:
    """Places options one after another, each where the busiest rank gets the least load, within capacities.

    Args:
        problem: the options and ranks.
        base: load [W] that the ranks begin with; default none.
    """

    def __init__(self, problem: Problem, base: FloatN | None = None) -> None:
        self.problem = problem
        self.base = np.zeros(problem.world_size) if base is None else base

    def empty(self) -> Placement:
        """A placement without units."""
        p = self.problem
        choice, ranks = np.full(p.num_units, -1, np.int64), [np.zeros(0, np.int64)] * p.num_units
        return Placement(choice, ranks, self.base.copy(), np.zeros(p.caps.shape))

    def find(self, at: Placement, option: int) -> IntN | None:
        """Ranks for the shards of ``option`` in addition to ``at``; None if the option does not fit."""
        p = self.problem
        s, mode = p.shards_of(option), p.mode[option]
        if mode == FIXED:
            ranks = p.fixed_rank[s]
            return ranks if (at.used[:, ranks] + p.bytes[:, s] <= p.caps[:, ranks]).all() else None
        if mode == FREE:
            return self._free(at, s, 0, p.world_size)
        if mode == HOST:
            return self._host_rows(at, s)
        if mode == HOST_FREE:
            return self._best_host(at, s)
        return self._multi_host(at, s)

    def _free(self, at: Placement, s: slice, first: int, last: int) -> IntN | None:
        """Place each shard, the largest first, on the least loaded rank of [first, last) with enough memory."""
        p = self.problem
        perf, num_bytes, caps = p.perf[s], p.bytes[:, s], p.caps[:, first:last]
        if perf.size == 1:
            after = at.used[:, first:last] + num_bytes
            load = np.where(np.logical_and.reduce(after <= caps), at.perf[first:last], np.inf)
            least = load.min()
            if least == np.inf:
                return None
            # Among equally loaded ranks choose the one with the most free memory: tables of equal cost may differ a
            # lot in size.
            filled = np.maximum.reduce(after / np.maximum(caps, 1.0))
            # An empty rank may have a load of -1e-18 after moves: the slack is added, as a factor would exclude every
            # rank.
            return np.array([first + int(np.where(load <= least + abs(least) * 1e-9, filled, np.inf).argmin())])
        load, used = at.perf[first:last].copy(), at.used[:, first:last].copy()
        ranks = np.empty(perf.size, np.int64)
        for i in np.argsort(-perf, kind="stable"):
            amount = num_bytes[:, i]
            masked = np.where(np.logical_and.reduce(used + amount[:, None] <= caps), load, np.inf)
            rank = int(masked.argmin())
            if masked[rank] == np.inf:
                return None
            load[rank] += perf[i]
            used[:, rank] += amount
            ranks[i] = first + rank
        return ranks

    def _host_rows(self, at: Placement, s: slice) -> IntN | None:
        """Place shard i on rank i of the host whose busiest rank is least busy."""
        p, local = self.problem, self.problem.local_world_size
        load = (at.perf.reshape(-1, local) + p.perf[s]).max(axis=1)
        by_host = (len(at.used), -1, local)
        fits = at.used.reshape(by_host) + p.bytes[:, None, s] <= p.caps.reshape(by_host)
        load = np.where(fits.all(axis=(0, 2)), load, np.inf)
        host = int(load.argmin())
        return host * local + np.arange(local) if load[host] < np.inf else None

    def _best_host(self, at: Placement, s: slice) -> IntN | None:
        """Place all shards on the ranks of one host, the least loaded host on which they fit."""
        local = self.problem.local_world_size
        order = np.argsort(at.perf.reshape(-1, local).mean(axis=1), kind="stable")
        for host in order:
            ranks = self._free(at, s, int(host) * local, (int(host) + 1) * local)
            if ranks is not None:
                return ranks
        return None

    def _multi_host(self, at: Placement, s: slice) -> IntN | None:
        """Place each group of ``local`` shards on one host."""
        local = self.problem.local_world_size
        trial = at.copy()
        found = []
        for start in range(s.start, s.stop, local):
            piece = slice(start, start + local)
            ranks = self._host_rows(trial, piece)
            if ranks is None:
                return None
            found.append(ranks)
            self._add(trial, piece, ranks, 1.0)
        return np.concatenate(found)

    def _add(self, at: Placement, s: slice, ranks: IntN, sign: float) -> None:
        p = self.problem
        if ranks.size == 1:
            rank = ranks[0]
            at.perf[rank] += sign * p.perf[s.start]
            at.used[:, rank] += sign * p.bytes[:, s.start]
            return
        np.add.at(at.perf, ranks, sign * p.perf[s])
        for used, num_bytes in zip(at.used, p.bytes):
            np.add.at(used, ranks, sign * num_bytes[s])

    def put(self, at: Placement, unit: int, option: int, ranks: IntN) -> None:
        """Record ``option`` on ``ranks``."""
        at.choice[unit], at.ranks[unit] = option, ranks
        self._add(at, self.problem.shards_of(option), ranks, 1.0)

    def take(self, at: Placement, unit: int) -> tuple[int, IntN]:
        """Undo :meth:`put`."""
        option, ranks = int(at.choice[unit]), at.ranks[unit]
        self._add(at, self.problem.shards_of(option), ranks, -1.0)
        return option, ranks

    def greedy(self, choice: IntN, cost: FloatN) -> Placement | None:
        """Place the chosen options: fixed ones, then hosts, then single shards from large load to small.

        A unit whose option does not fit takes its next cheapest option (by ``cost`` [O]) that does.
        """
        p = self.problem
        at = self.empty()
        size = p.option_perf[choice] / np.maximum(np.diff(p.shard_ptr)[choice], 1)
        rigid = np.array([1, 3, 2, 2, 2])[p.mode[choice]]  # by mode: fixed first, free last
        total = p.option_bytes[:, choice].sum(axis=0)
        for unit in np.lexsort((np.arange(choice.size), -total, -size, -rigid)):
            if not self.put_any(at, int(unit), int(choice[unit]), cost):
                return None
        return at

    def put_any(self, at: Placement, unit: int, option: int, cost: FloatN) -> bool:
        """Put ``option`` of ``unit``, or else its cheapest option that fits; False when none does."""
        ranks = self.find(at, option)
        if ranks is None:
            first, last = int(self.problem.unit_ptr[unit]), int(self.problem.unit_ptr[unit + 1])
            for other in first + np.argsort(cost[first:last], kind="stable"):
                if other == option or not self.problem.possible[other]:
                    continue
                ranks = self.find(at, int(other))
                if ranks is not None:
                    option = int(other)
                    break
            else:
                return False
        self.put(at, unit, option, ranks)
        return True


def packer(problem: Problem) -> Placer:
    """A placer by size. A shard's load is its share of a rank's memory, and a smaller rank begins as if partly filled.

    The placements are those of another problem; :func:`refresh` restores the loads.
    """
    p = problem
    largest = np.maximum(p.caps.max(axis=1, keepdims=True), 1.0)
    size = (p.bytes / largest).sum(axis=0)
    starts = p.shard_ptr[:-1]
    by_size = replace(
        p, perf=size, option_perf=np.add.reduceat(size, starts), option_max=np.maximum.reduceat(size, starts)
    )
    room = (p.caps / largest).sum(axis=0)
    return Placer(by_size, base=room.max() - room)


def refresh(problem: Problem, at: Placement) -> Placement:
    """The placement with recomputed sums, without the rounding errors of many moves."""
    fresh = Placer(problem).empty()
    placer = Placer(problem)
    for unit in range(problem.num_units):
        placer.put(fresh, unit, int(at.choice[unit]), at.ranks[unit])
    return fresh
