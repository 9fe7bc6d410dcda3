"""TorchRec's proposers: strategies that propose one option per table in each round."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator

import numpy as np

from recinfer.distributed.planner.interfaces import Enumerator, Proposer
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology, tier_bytes
from recinfer.errors import ConfigError

__all__ = ["DynamicProgrammingProposer", "GreedyProposer", "GridSearchProposer", "UniformProposer"]

logger = logging.getLogger(__name__)

ByTable = dict[str, list[ShardingOption]]


def _by_table(search_space: list[ShardingOption]) -> ByTable:
    """The options of every table, in their order."""
    tables: ByTable = {}
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def _rating(option: ShardingOption, use_depth: bool) -> float:
    """Milliseconds of an option's slowest shard, or the sum over its shards."""
    if not use_depth:
        return option.total_perf
    return max(s.perf.total for s in option.shards if s.perf is not None)


class GreedyProposer(Proposer):
    """Starts with every table's fastest option; each round gives the table that uses most memory its next option.

    Args:
        use_depth: rate options by their slowest shard; otherwise by the sum over shards.
        threshold: stop after this many proposals in a row that are no better than the best so far.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth = use_depth
        self._threshold = threshold
        self._tables: ByTable = {}
        self._at: dict[str, int] = {}
        self._done = True
        self._best = math.inf
        self._worse_in_a_row = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Sort the options of each table by perf."""
        self._tables = _by_table(search_space)
        for options in self._tables.values():
            options.sort(key=lambda o: _rating(o, self._use_depth))
        self._at = dict.fromkeys(self._tables, 0)
        self._done = not self._tables
        self._best, self._worse_in_a_row = math.inf, 0

    def propose(self) -> list[ShardingOption] | None:
        """The current option of each table, or None at the end."""
        if self._done:
            return None
        return [options[self._at[fqn]] for fqn, options in self._tables.items()]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Move one table to its next option."""
        if self._done:
            return
        if self._threshold is not None and perf_rating is not None:
            if perf_rating < self._best:
                self._best, self._worse_in_a_row = perf_rating, 0
            else:
                self._worse_in_a_row += 1
                if self._worse_in_a_row >= self._threshold:
                    self._done = True
                    return
        movable = [fqn for fqn, options in self._tables.items() if self._at[fqn] + 1 < len(options)]
        if not movable:
            self._done = True
            return

        def usage(fqn: str) -> tuple[int, ...]:
            shards = self._tables[fqn][self._at[fqn]].shards
            return tuple(map(max, zip(*(tier_bytes(s.storage) for s in shards if s.storage is not None))))

        self._at[max(movable, key=usage)] += 1


class _PreparedProposer(Proposer):
    """Base of proposers with a fixed list of proposals, independent of feedback."""

    def __init__(self) -> None:
        self._rest: Iterator[list[ShardingOption]] = iter(())
        self._current: list[ShardingOption] | None = None

    def _prepare(self, proposals: Iterable[list[ShardingOption]]) -> None:
        self._rest = iter(proposals)
        self._current = next(self._rest, None)

    def propose(self) -> list[ShardingOption] | None:
        """The next proposal, or None at the end."""
        return self._current

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Advance to the next proposal."""
        self._current = next(self._rest, None)


class UniformProposer(_PreparedProposer):
    """Proposes plans with one sharding type for all tables, then with one type and kernel. A type that a table does not
    offer has no such plan.

    Args:
        use_depth: rate options by their slowest shard.
    """

    def __init__(self, use_depth: bool = True) -> None:
        super().__init__()
        self._use_depth = use_depth

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Collect the uniform plans."""
        tables = _by_table(search_space)
        pairs = dict.fromkeys((o.sharding_type, o.compute_kernel) for o in search_space)
        wanted: list[tuple[str, str | None]] = [(kind, None) for kind in dict.fromkeys(t for t, _ in pairs)]
        wanted += list(pairs)
        proposals: list[list[ShardingOption]] = []
        seen: set[tuple[int, ...]] = set()
        for kind, kernel in wanted:
            plan = []
            for options in tables.values():
                fits = [o for o in options if o.sharding_type == kind and kernel in (None, o.compute_kernel)]
                if not fits:
                    break
                plan.append(min(fits, key=lambda o: _rating(o, self._use_depth)))
            key = tuple(id(o) for o in plan)
            if len(plan) == len(tables) and key not in seen:
                seen.add(key)
                proposals.append(plan)
        self._prepare(proposals)


class GridSearchProposer(_PreparedProposer):
    """Proposes every combination if there are at most ``max_proposals``; otherwise none.

    Args:
        max_proposals: limit.
    """

    def __init__(self, max_proposals: int = 10_000) -> None:
        super().__init__()
        self._max_proposals = max_proposals

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Start over."""
        tables = _by_table(search_space)
        count = math.prod(len(options) for options in tables.values())
        if count > self._max_proposals:
            logger.info("grid search skipped: %d combinations, more than %d", count, self._max_proposals)
            self._prepare(())
            return
        self._prepare(list(combination) for combination in itertools.product(*tables.values()) if combination)


class DynamicProgrammingProposer(Proposer):
    """Least total perf for each amount of total memory, by dynamic programming over memory bins.

    The first proposal is the plan with the least memory; its feedback brings the topology. Then follows, for each bin
    from the largest amount of memory to the smallest, the plan with the least total perf that uses that much: total
    memory does not say whether a plan can be placed, so all amounts are proposed. With ``ddr_bins_per_device`` the table is two-dimensional.

    Args:
        hbm_bins_per_device: bins of device memory per rank (of host memory when the topology has no device memory).
        ddr_bins_per_device: bins of host memory per rank, in addition; None: plan with one kind of memory only.
        mem_bins_per_device: TorchEasyRec's name of ``hbm_bins_per_device``; used instead when given.
    """

    def __init__(
        self,
        hbm_bins_per_device: int = 100,
        ddr_bins_per_device: int | None = None,
        mem_bins_per_device: int | None = None,
    ) -> None:
        self._bins = max(hbm_bins_per_device if mem_bins_per_device is None else mem_bins_per_device, 1)
        self._ddr_bins = ddr_bins_per_device
        self._tables: ByTable = {}
        self._planned = False
        self._proposals: list[list[int]] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Sort each table's options by the planned memory, in a stable order."""
        self._tables = _by_table(search_space)
        on_device = any(o.total_storage.hbm for o in search_space)

        def memory(option: ShardingOption) -> tuple[int, ...]:
            storage = option.total_storage
            both = (storage.hbm, storage.ddr)
            return both if self._ddr_bins else both[:1] if on_device else both[1:]

        for options in self._tables.values():
            options.sort(key=memory)
        self._planned, self._proposals = False, []

    def propose(self) -> list[ShardingOption] | None:
        """The plan with the least memory, then the computed ones."""
        if not self._planned:
            return [options[0] for options in self._tables.values()] or None
        if not self._proposals:
            return None
        return [options[i] for i, options in zip(self._proposals[0], self._tables.values())]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Compute the plans in the first call, which must pass the topology; later calls advance to the next plan."""
        if self._planned:
            if self._proposals:
                self._proposals.pop(0)
            return
        if storage_constraint is None:
            raise ConfigError(
                "the first feedback of DynamicProgrammingProposer needs storage_constraint (the topology)"
            )
        self._planned = True
        self._proposals = self._plan(storage_constraint)

    def _plan(self, topology: Topology) -> list[list[int]]:
        if not self._tables:
            return []
        devices = topology.devices
        totals = [sum(d.storage.hbm for d in devices), sum(d.storage.ddr for d in devices)]
        by_ddr_only = totals[0] == 0
        first = totals[1] if by_ddr_only else totals[0]
        num = self._bins * len(devices)
        num_d = (self._ddr_bins or 0) * len(devices) if not by_ddr_only else 0
        size, size_d = first / num, (totals[1] / num_d if num_d else math.inf)
        columns = max(num_d, 1)
        best = np.full(num * columns, np.inf)
        used, used_d = np.full(best.size, np.inf), np.full(best.size, np.inf)
        best[0], used[0], used_d[0] = 0.0, 0.0, 0.0
        trail: list[tuple[np.ndarray, np.ndarray]] = []
        for options in self._tables.values():
            states = np.flatnonzero(np.isfinite(best))
            perf, mem, mem_d, pick, came, cell = [], [], [], [], [], []
            for i, option in enumerate(options):
                storage = option.total_storage
                m = used[states] + (storage.ddr if by_ddr_only else storage.hbm) / size
                d = used_d[states] + (storage.ddr / size_d if num_d else 0.0)
                ok = (m < num) & (d < columns)
                perf.append(best[states][ok] + option.total_perf)
                mem.append(m[ok])
                mem_d.append(d[ok])
                pick.append(np.full(int(ok.sum()), i))
                came.append(states[ok])
                cell.append(m[ok].astype(np.int64) * columns + d[ok].astype(np.int64))
            all_perf, cells = np.concatenate(perf), np.concatenate(cell)
            # The last writer of a cell wins, so options are written from worst to best, and of equal options the first
            # is last.
            order = np.lexsort((-np.arange(all_perf.size), -all_perf))
            best, used, used_d = (np.full(best.size, np.inf) for _ in range(3))
            choice, previous = np.full(best.size, -1), np.full(best.size, -1)
            at = cells[order]
            best[at] = all_perf[order]
            used[at], used_d[at] = np.concatenate(mem)[order], np.concatenate(mem_d)[order]
            choice[at], previous[at] = np.concatenate(pick)[order], np.concatenate(came)[order]
            trail.append((choice, previous))
        proposals = []
        for cell_index in np.flatnonzero(np.isfinite(best))[::-1]:
            indices, state = [], int(cell_index)
            for choice, previous in reversed(trail):
                indices.append(int(choice[state]))
                state = int(previous[state])
            proposals.append(indices[::-1])
        return proposals
