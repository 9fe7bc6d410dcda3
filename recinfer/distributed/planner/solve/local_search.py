"""Improves a placement: relieves the busiest rank, spends free memory, perturbs the placement and searches again."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from recinfer.distributed.planner.model.estimates import FloatN, IntN
from recinfer.distributed.planner.solve.placing import Placement, Placer, refresh
from recinfer.distributed.planner.solve.problem import FIXED, FREE, HOST, Problem

__all__ = ["GOOD", "LocalSearch"]

GOOD = 1.0005  # close enough to the bound to stop

_SINGLE, _UNIFORM, _HOST_ROWS, _OTHER = range(4)


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
        alternatives: list[IntN] | None = None,
    ) -> None:
        self.problem = problem
        self.placer = placer
        self.deadline = deadline
        self.max_moves = max_moves
        self.moves = 0
        self.alternatives = self._prune() if alternatives is None else alternatives
        self.by_kind = self._kinds()

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

    def _kinds(self) -> list[list[IntN]]:
        """Alternatives of each unit by how they are evaluated."""
        p = self.problem
        single = (p.mode == FREE) & (np.diff(p.shard_ptr) == 1)
        whole = (p.mode == FIXED) & (np.diff(p.shard_ptr) == p.world_size)
        ordered = np.concatenate([[True], np.diff(p.fixed_rank) == 1])  # uniform options name ranks 0, 1, ...
        ordered[p.shard_ptr[:-1]] = p.fixed_rank[p.shard_ptr[:-1]] == 0
        uniform = whole & np.logical_and.reduceat(ordered, p.shard_ptr[:-1])
        rows = (p.mode == HOST) & (np.diff(p.shard_ptr) == p.local_world_size)
        kind = np.where(single, _SINGLE, np.where(uniform, _UNIFORM, np.where(rows, _HOST_ROWS, _OTHER)))
        return [[o[kind[o] == k] for o in self.alternatives] for k in range(4)]

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
        without = self._without(at, units)
        best: tuple[float, int, int, IntN] | None = None
        for found in (
            self._try_single(units, without),
            self._try_rows(units, without),
            self._try_pieces(units, without),
        ):
            if found is not None and found[0] < top * (1 - 1e-9) and (best is None or found[0] < best[0]):
                best = found
        if best is None:
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

    def _pairs(self, units: IntN, kind: int) -> tuple[IntN, IntN]:
        """(row in ``units``, option) of all alternatives of ``kind``."""
        lists = [self.by_kind[kind][u] for u in units]
        return np.repeat(np.arange(units.size), [x.size for x in lists]), np.concatenate(lists)

    def _try_single(self, units: IntN, w: _LoadsWithout) -> tuple[float, int, int, IntN] | None:
        """Try options with one shard, on the best rank."""
        p = self.problem
        row, option = self._pairs(units, _SINGLE)
        if not row.size:
            return None
        shard = p.shard_ptr[option]
        load = w.perf[row]
        for used, amount, cap in zip(w.used, p.bytes, p.caps):
            load[used[row] + amount[shard, None] > cap] = np.inf
        rank = load.argmin(axis=1)
        value = np.maximum(load[np.arange(row.size), rank] + p.perf[shard], w.old_top[row])
        i = int(value.argmin())
        return float(value[i]), int(units[row[i]]), int(option[i]), np.array([rank[i]])

    def _try_rows(self, units: IntN, w: _LoadsWithout) -> tuple[float, int, int, IntN] | None:
        """Try options with one shard on every rank of the world (uniform), or of the best host."""
        p = self.problem
        best = None
        for kind, size in ((_UNIFORM, p.world_size), (_HOST_ROWS, p.local_world_size)):
            row, option = self._pairs(units, kind)
            if not row.size:
                continue
            shard = p.shard_ptr[option][:, None] + np.arange(size)
            hosts = p.world_size // size
            shape = (row.size, hosts, size)
            load = w.perf[row].reshape(shape) + p.perf[shard][:, None, :]
            top = load.max(axis=2)
            for used, amount, cap in zip(w.used, p.bytes, p.caps):
                over = used[row].reshape(shape) + amount[shard][:, None, :] > cap.reshape(1, hosts, size)
                top[over.any(axis=2)] = np.inf
            host = top.argmin(axis=1)
            value = np.maximum(top[np.arange(row.size), host], w.old_top[row])
            i = int(value.argmin())
            found = (float(value[i]), int(units[row[i]]), int(option[i]), host[i] * size + np.arange(size))
            if best is None or found[0] < best[0]:
                best = found
        return best

    def _try_pieces(self, units: IntN, w: _LoadsWithout) -> tuple[float, int, int, IntN] | None:
        """Try all other options: several free shards, or groups of shards on hosts."""
        p = self.problem
        row, option = self._pairs(units, _OTHER)
        best = None
        for r, o in zip(row.tolist(), option.tolist()):
            trial = Placement(w.at.choice, w.at.ranks, w.perf[r], w.used[:, r])
            ranks = self.placer.find(trial, o)
            if ranks is None:
                continue
            load = w.perf[r].copy()
            np.add.at(load, ranks, p.perf[p.shards_of(o)])
            value = max(float(load[ranks].max()), float(w.old_top[r]))
            if best is None or value < best[0]:
                best = (value, int(units[r]), o, ranks)
        return best

    def spend_memory(self, at: Placement) -> Placement:
        """Alternate :meth:`cheapen` with evening memory out, so that a single full rank does not prevent a replica."""
        best = at
        for _ in range(4):
            before = best.perf.sum()
            self.cheapen(best)
            evened = self._even_memory(best)
            self.cheapen(evened)
            if evened.perf.sum() >= before * (1 - 1e-6) or time.monotonic() > self.deadline:
                return evened if evened.perf.sum() < before else best
            best = evened
        return best

    def _even_memory(self, at: Placement) -> Placement:
        """A placement of the same options, whose free shards are moved and swapped to make the fullest rank less
        full."""
        p = self.problem
        fullest = int((at.used / np.maximum(p.caps, 1)).max(axis=1).argmax())
        by_bytes = LocalSearch(
            replace(p, perf=p.bytes[fullest]), self.placer, self.deadline, 0, alternatives=self.alternatives
        )
        trial = Placement(at.choice.copy(), list(at.ranks), at.used[fullest].copy(), at.used.copy())
        by_bytes._collect(trial)
        for _ in range(300):
            if not by_bytes._move_or_swap(trial, int(trial.perf.argmax())):
                break
        return refresh(p, trial)

    def cheapen(self, at: Placement) -> None:
        """Spend free memory: change units to options with less total load, in order of load saved per byte, if they
        fit.

        The busiest rank may rise by it; balancing comes after. Relieving one rank after another never finds these
        changes, as a replica adds load to every rank.
        """
        p = self.problem
        weight = 1.0 / np.maximum(p.caps.max(axis=1, keepdims=True), 1.0)
        memory = (p.option_bytes * weight).sum(axis=0)
        for _ in range(4):
            moves = []
            for unit in range(p.num_units):
                now = int(at.choice[unit])
                for option in self.alternatives[unit]:
                    saved = p.option_perf[now] - p.option_perf[option]
                    if saved > 1e-9 * p.option_perf[now]:
                        moves.append((-saved / max(memory[option] - memory[now], 1e-9), unit, int(option)))
            changed = 0
            for _, unit, option in sorted(moves):
                now = int(at.choice[unit])
                if p.option_perf[option] >= p.option_perf[now]:
                    continue
                old_option, old_ranks = self.placer.take(at, unit)
                ranks = self.placer.find(at, option)
                if ranks is None:
                    self.placer.put(at, unit, old_option, old_ranks)
                else:
                    self.placer.put(at, unit, option, ranks)
                    changed += 1
            if not changed or time.monotonic() > self.deadline:
                break

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
