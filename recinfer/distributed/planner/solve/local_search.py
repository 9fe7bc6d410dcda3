"""Improves a placement: relieves the busiest rank, perturbs the placement and searches again."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from recinfer.distributed.planner.model.estimates import FloatN, IntN
from recinfer.distributed.planner.solve.placing import Placement, Placer
from recinfer.distributed.planner.solve.problem import FREE, Problem

__all__ = ["GOOD", "LocalSearch"]

GOOD = 1.0005  # close enough to the bound to stop


@dataclass(frozen=True)
class _LoadsWithout:
    """Loads [n, W] of the ranks without each of n units, and the load of the unit's most loaded old rank [n]."""

    perf: FloatN
    used: FloatN  # bytes [M, n, W]
    old_top: FloatN
    at: Placement


class LocalSearch:
    """Relieves the busiest rank until no step improves it: moves a shard, swaps two, or changes the option of a
    unit."""

    def __init__(
        self,
        problem: Problem,
        placer: Placer,
        deadline: float,
        max_moves: int,
    ) -> None:
        self.problem = problem
        self.placer = placer
        self.deadline = deadline
        self.max_moves = max_moves
        self.moves = 0
        self.alternatives = self._prune()

    def _prune(self) -> list[IntN]:
        """Options of each unit that no other option of the unit beats in load and in bytes of each tier, in all and per shard.

        The bytes of a shard count too, because four small pieces may fit where one large piece does not. An option with
        fixed ranks never beats an option with free ranks.
        """
        p = self.problem
        starts = p.shard_ptr[:-1]
        largest = np.maximum.reduceat(p.bytes, starts, axis=1)
        figures = np.stack([p.option_perf, p.option_max, *p.option_bytes, *largest], axis=1)
        keep = []
        for unit in range(p.num_units):
            o = np.arange(p.unit_ptr[unit], p.unit_ptr[unit + 1])
            o = o[p.possible[o]]
            v = figures[o]
            bound = p.mode[o] != FREE
            worse = (v[:, None, :] >= v[None, :, :]).all(axis=2)  # [i, j]: j is at least as good as i
            worse &= bound[:, None] | ~bound[None, :]
            equal = worse & worse.T
            earlier = np.tri(o.size, k=-1, dtype=bool)  # j < i
            beaten = np.any(worse & ~equal, axis=1) | np.any(equal & earlier, axis=1)
            keep.append(o[~beaten])
        return keep

    def _collect(self, at: Placement) -> None:
        """Arrays of all shards that may go to any rank: unit, position, rank, load, bytes."""
        p = self.problem
        free_units = np.flatnonzero(p.mode[at.choice] == FREE)
        self.bound_units = np.flatnonzero(p.mode[at.choice] != FREE).tolist()
        counts = np.diff(p.shard_ptr)[at.choice[free_units]]
        self.item_unit = np.repeat(free_units, counts)
        start = np.repeat(p.shard_ptr[at.choice[free_units]], counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        self.item_at = np.arange(self.item_unit.size) - before
        shard = start + self.item_at
        self.item_perf, self.item_bytes = p.perf[shard], p.bytes[:, shard]
        ranks = [at.ranks[u] for u in free_units]
        self.item_rank = np.concatenate(ranks) if ranks else np.zeros(0, np.int64)

    def run(self, at: Placement, target: float) -> Placement:
        """Improve ``at`` in place until its busiest rank is at ``target`` or nothing helps."""
        self._collect(at)
        while self.moves < self.max_moves and at.worst > target * (1 + 1e-6) and time.monotonic() < self.deadline:
            busy = int(at.perf.argmax())
            if not (self._move_or_swap(at, busy) or self._change_option(at, busy)):
                break
            self.moves += 1
        return at

    def _relocate(self, at: Placement, item: int, rank: int) -> None:
        unit, position, old = int(self.item_unit[item]), int(self.item_at[item]), int(self.item_rank[item])
        ranks = at.ranks[unit].copy()
        ranks[position] = rank
        at.ranks[unit] = ranks
        for used, amount in zip((at.perf, *at.used), (self.item_perf, *self.item_bytes)):
            used[old] -= amount[item]
            used[rank] += amount[item]
        self.item_rank[item] = rank

    def _move_or_swap(self, at: Placement, busy: int) -> bool:
        """The best move of a shard off ``busy``, or swap with a smaller shard elsewhere, if it lowers both ranks."""
        p = self.problem
        mine = np.flatnonzero(self.item_rank == busy)
        if not mine.size:
            return False
        top = at.perf[busy]
        size = self.item_perf[mine]
        # Moves: [mine, W]
        after = np.maximum(top - size[:, None], at.perf[None, :] + size[:, None])
        for used, amount, cap in zip(at.used, self.item_bytes, p.caps):
            after[used + amount[mine, None] > cap] = np.inf
        after[:, busy] = np.inf
        best = int(after.argmin())
        move_value, (mi, rank) = after.flat[best], divmod(best, p.world_size)
        # Swaps with shards on the least busy ranks: [this rank's shards, the other ranks' shards]
        idle = np.argsort(at.perf, kind="stable")[: max(4, min(16, p.world_size // 4))]
        theirs = np.flatnonzero(np.isin(self.item_rank, idle[idle != busy]))
        swap_value, pair = self._best_swap(at, mine, theirs, busy) if theirs.size else (np.inf, (0, 0))
        if min(move_value, swap_value) >= top * (1 - 1e-9):
            return False
        if move_value <= swap_value:
            self._relocate(at, int(mine[mi]), rank)
        else:
            a, b = pair
            rank = int(self.item_rank[b])
            self._relocate(at, a, rank)
            self._relocate(at, b, busy)
        return True

    def _best_swap(self, at: Placement, mine: IntN, theirs: IntN, busy: int) -> tuple[float, tuple[int, int]]:
        p = self.problem
        if mine.size * theirs.size > 2_000_000:  # the largest and smallest of this rank's shards
            mine = mine[np.argsort(-self.item_perf[mine], kind="stable")[: max(1, 2_000_000 // theirs.size)]]
        gain = self.item_perf[mine, None] - self.item_perf[None, theirs]
        other = self.item_rank[theirs]
        after = np.maximum(at.perf[busy] - gain, at.perf[other] + gain)
        for used, amount, cap in zip(at.used, self.item_bytes, p.caps):
            more = amount[mine, None] - amount[None, theirs]
            after[(used[other] + more > cap[other]) | (used[busy] - more > cap[busy])] = np.inf
        best = int(after.argmin())
        i, j = divmod(best, theirs.size)
        return float(after.flat[best]), (int(mine[i]), int(theirs[j]))

    def _change_option(self, at: Placement, busy: int, max_units: int = 96) -> bool:
        """Give a unit with load on ``busy`` another option (or place), if all ranks it touches end below the top."""
        top = float(at.perf[busy])
        units = self._units_on(at, busy)[:max_units]
        if not units.size:
            return False
        best = self._best_option(units, self._without(at, units))
        if best is None or best[0] >= top * (1 - 1e-9):
            return False
        _, unit, option, ranks = best
        self.placer.take(at, unit)
        self.placer.put(at, unit, option, ranks)
        self._collect(at)
        return True

    def _units_on(self, at: Placement, busy: int) -> IntN:
        """Units with load on ``busy``, heaviest there first."""
        p = self.problem
        load = np.zeros(p.num_units)
        mine = self.item_rank == busy
        np.add.at(load, self.item_unit[mine], self.item_perf[mine])
        for unit in self.bound_units:
            here = at.ranks[unit] == busy
            if here.any():
                load[unit] = p.perf[p.shards_of(int(at.choice[unit]))][here].sum()
        units = np.flatnonzero(load > 0)
        return units[np.argsort(-load[units], kind="stable")]

    def _without(self, at: Placement, units: IntN) -> _LoadsWithout:
        """Loads and bytes [n, W] as they would be with each of ``units`` taken out, and the top of its old ranks [n]."""
        p = self.problem
        counts = np.array([at.ranks[u].size for u in units])
        row = np.repeat(np.arange(units.size), counts)
        ranks = np.concatenate([at.ranks[u] for u in units])
        shard = np.concatenate([np.arange(p.shard_ptr[at.choice[u]], p.shard_ptr[at.choice[u] + 1]) for u in units])
        perf, used = np.tile(at.perf, (units.size, 1)), np.repeat(at.used[:, None], units.size, axis=1)
        for left, amount in zip((perf, *used), (p.perf, *p.bytes)):
            np.subtract.at(left, (row, ranks), amount[shard])
        touched = np.zeros((units.size, p.world_size), bool)
        touched[row, ranks] = True
        old_top = np.where(touched, perf, -np.inf).max(axis=1)
        return _LoadsWithout(perf, used, old_top, at)

    def _best_option(self, units: IntN, w: _LoadsWithout) -> tuple[float, int, int, IntN] | None:
        """The option of one of ``units`` that leaves the ranks it touches least loaded: load, unit, option, its ranks."""
        p = self.problem
        best = None
        for r, unit in enumerate(units.tolist()):
            trial = Placement(w.at.choice, w.at.ranks, w.perf[r], w.used[:, r])
            for option in self.alternatives[unit].tolist():
                ranks = self.placer.find(trial, option)
                if ranks is None:
                    continue
                load = w.perf[r].copy()
                np.add.at(load, ranks, p.perf[p.shards_of(option)])
                value = max(float(load[ranks].max()), float(w.old_top[r]))
                if best is None or value < best[0]:
                    best = (value, unit, option, ranks)
        return best

    def shake(self, best: Placement, target: float) -> Placement:
        """Iterated local search: perturb the busiest rank and a few others, search again, and keep results that are no
        worse.

        Random but seeded; effort is counted in moves, so that it is the same on every machine.
        """
        p = self.problem
        random = np.random.default_rng(7)
        last_move = self.moves + 300 + p.num_units
        rounds = stale = 0
        while (
            best.worst > target * GOOD
            and self.moves < last_move
            and rounds < 60
            and stale < 20
            and time.monotonic() < self.deadline
            and p.num_units <= 2_000
        ):
            rounds += 1
            stale += 1
            trial = best.copy()
            if self._unsettle(trial, random):
                self.run(trial, target)
                if trial.worst < best.worst * (1 - 1e-6):
                    stale = 0
                if trial.worst <= best.worst * (1 + 1e-12):
                    best = trial
        return best

    def _unsettle(self, at: Placement, random: np.random.Generator) -> bool:
        """Remove units from the busiest rank and some others and place them again in another order, some with other
        options."""
        p, placer = self.problem, self.placer
        ranks = {int(at.perf.argmax()), *random.integers(p.world_size, size=int(random.integers(1, 4))).tolist()}
        share = random.uniform(0.3, 1.0)
        units = [u for u in range(p.num_units) if ranks.intersection(at.ranks[u].tolist()) and random.random() < share]
        if p.mode[at.choice[units]].size and len(units) > 40:
            units = random.permutation(units)[:40].tolist()
        old = {u: placer.take(at, u)[0] for u in units}
        noisy = {u: p.option_perf[o] * random.lognormal(0.0, 0.4) for u, o in old.items()}
        for unit in sorted(units, key=lambda u: -noisy[u]):
            option = old[unit]
            if random.random() < 0.25 and self.alternatives[unit].size > 1:
                option = int(random.choice(self.alternatives[unit]))
            if not placer.put_any(at, unit, option, p.option_perf):
                return False
        return True
