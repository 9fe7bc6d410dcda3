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
    hbm: FloatN
    ddr: FloatN

    @property
    def worst(self) -> float:
        """Load of the busiest rank, ms."""
        return float(self.perf.max())

    def copy(self) -> Placement:
        """An independent copy."""
        return Placement(self.choice.copy(), list(self.ranks), self.perf.copy(), self.hbm.copy(), self.ddr.copy())


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
        zeros = np.zeros(p.world_size)
        return Placement(
            np.full(p.num_units, -1, np.int64), [np.zeros(0, np.int64)] * p.num_units, self.base.copy(), zeros, zeros.copy()
        )  # fmt: skip

    def find(self, at: Placement, option: int) -> IntN | None:
        """Ranks for the shards of ``option`` in addition to ``at``; None if the option does not fit."""
        p = self.problem
        s, mode = p.shards_of(option), p.mode[option]
        if mode == FIXED:
            ranks = p.fixed_rank[s]
            ok = (at.hbm[ranks] + p.hbm[s] <= p.hbm_cap[ranks]).all() and (
                at.ddr[ranks] + p.ddr[s] <= p.ddr_cap[ranks]
            ).all()
            return ranks if ok else None
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
        perf, hbm, ddr = p.perf[s], p.hbm[s], p.ddr[s]
        if perf.size == 1:
            room = (at.hbm[first:last] + hbm[0] <= p.hbm_cap[first:last]) & (
                at.ddr[first:last] + ddr[0] <= p.ddr_cap[first:last]
            )
            load = np.where(room, at.perf[first:last], np.inf)
            least = load.min()
            if least == np.inf:
                return None
            # Among equally loaded ranks choose the one with the most free memory: tables of equal cost may differ a
            # lot in size.
            filled = (at.hbm[first:last] + hbm[0]) / np.maximum(p.hbm_cap[first:last], 1.0)
            filled = np.maximum(filled, (at.ddr[first:last] + ddr[0]) / np.maximum(p.ddr_cap[first:last], 1.0))
            # An empty rank may have a load of -1e-18 after moves: the slack is added, as a factor would exclude every
            # rank.
            return np.array([first + int(np.where(load <= least + abs(least) * 1e-9, filled, np.inf).argmin())])
        load, used_h, used_d = at.perf[first:last].copy(), at.hbm[first:last].copy(), at.ddr[first:last].copy()
        cap_h, cap_d = p.hbm_cap[first:last], p.ddr_cap[first:last]
        ranks = np.empty(perf.size, np.int64)
        for i in np.argsort(-perf, kind="stable"):
            masked = np.where((used_h + hbm[i] <= cap_h) & (used_d + ddr[i] <= cap_d), load, np.inf)
            rank = int(masked.argmin())
            if masked[rank] == np.inf:
                return None
            load[rank] += perf[i]
            used_h[rank] += hbm[i]
            used_d[rank] += ddr[i]
            ranks[i] = first + rank
        return ranks

    def _host_rows(self, at: Placement, s: slice) -> IntN | None:
        """Place shard i on rank i of the host whose busiest rank is least busy."""
        p, local = self.problem, self.problem.local_world_size
        load = (at.perf.reshape(-1, local) + p.perf[s]).max(axis=1)
        room = (at.hbm.reshape(-1, local) + p.hbm[s] <= p.hbm_cap.reshape(-1, local)).all(axis=1)
        room &= (at.ddr.reshape(-1, local) + p.ddr[s] <= p.ddr_cap.reshape(-1, local)).all(axis=1)
        load = np.where(room, load, np.inf)
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
            at.hbm[rank] += sign * p.hbm[s.start]
            at.ddr[rank] += sign * p.ddr[s.start]
            return
        np.add.at(at.perf, ranks, sign * p.perf[s])
        np.add.at(at.hbm, ranks, sign * p.hbm[s])
        np.add.at(at.ddr, ranks, sign * p.ddr[s])

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
        total = p.option_hbm[choice] + p.option_ddr[choice]
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
    hbm, ddr = max(float(p.hbm_cap.max()), 1.0), max(float(p.ddr_cap.max()), 1.0)
    size = p.hbm / hbm + p.ddr / ddr
    starts = p.shard_ptr[:-1]
    by_size = replace(
        p, perf=size, option_perf=np.add.reduceat(size, starts), option_max=np.maximum.reduceat(size, starts)
    )
    room = p.hbm_cap / hbm + p.ddr_cap / ddr
    return Placer(by_size, base=room.max() - room)


def refresh(problem: Problem, at: Placement) -> Placement:
    """The placement with recomputed sums, without the rounding errors of many moves."""
    fresh = Placer(problem).empty()
    placer = Placer(problem)
    for unit in range(problem.num_units):
        placer.put(fresh, unit, int(at.choice[unit]), at.ranks[unit])
    return fresh
