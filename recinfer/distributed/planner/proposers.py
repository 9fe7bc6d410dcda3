"""The documented proposers: each walks the space of one option a table in its own way, round by round."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from recinfer.distributed.planner.topology import Topology
from recinfer.distributed.planner.types import Enumerator, Proposer, ShardingOption
from recinfer.distributed.planner.utils import LuusJaakolaSearch
from recinfer.distributed.types import CacheParams
from recinfer.errors import ConfigError

__all__ = [
    "DynamicProgrammingProposer",
    "EmbeddingOffloadScaleupProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]

logger = logging.getLogger(__name__)

ByTable = OrderedDict[str, list[ShardingOption]]


def _by_table(search_space: list[ShardingOption]) -> ByTable:
    tables: ByTable = OrderedDict()
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def _depth(option: ShardingOption) -> float:
    """Milliseconds of the slowest shard."""
    return max(s.perf.total for s in option.shards if s.perf is not None)


def _rating(option: ShardingOption, use_depth: bool) -> float:
    return _depth(option) if use_depth else option.total_perf


class GreedyProposer(Proposer):
    """Starts with every table's fastest option; each round gives the table that uses most memory its next option.

    Args:
        use_depth: fast means a fast slowest shard; otherwise a small sum over shards.
        threshold: stop after this many proposals in a row that are no better than the best so far.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold
        self._tables: ByTable = OrderedDict()
        self._at: dict[str, int] = {}
        self._done = True
        self._best, self._worse_in_a_row = math.inf, 0

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
        """Move one table on."""
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

        def usage(fqn: str) -> tuple[int, int]:
            storages = [s.storage for s in self._tables[fqn][self._at[fqn]].shards if s.storage is not None]
            return max(s.hbm for s in storages), max(s.ddr for s in storages)

        self._at[max(movable, key=usage)] += 1


class UniformProposer(Proposer):
    """Proposes plans where all tables are sharded alike: each sharding type, then each type with each kernel.

    A table that does not offer the type keeps the plan out, as a mixed plan is not uniform.

    Args:
        use_depth: rate options by their slowest shard.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth
        self._proposals: list[list[ShardingOption]] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Collect the uniform plans."""
        tables = _by_table(search_space)
        pairs = dict.fromkeys((o.sharding_type, o.compute_kernel) for o in search_space)
        wanted: list[tuple[str, str | None]] = [(kind, None) for kind in dict.fromkeys(t for t, _ in pairs)]
        wanted += list(pairs)
        self._proposals, seen = [], set()
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
                self._proposals.append(plan)

    def propose(self) -> list[ShardingOption] | None:
        """The next uniform plan."""
        return self._proposals[0] if self._proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on to the next."""
        if self._proposals:
            self._proposals.pop(0)


class GridSearchProposer(Proposer):
    """Every combination, when there are at most ``max_proposals`` of them; otherwise nothing.

    Args:
        max_proposals: limit.
    """

    def __init__(self, max_proposals: int = 10_000) -> None:
        self._max_proposals = max_proposals
        self._iterator: Iterator[tuple[ShardingOption, ...]] = iter(())
        self._current: tuple[ShardingOption, ...] | None = None

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Start over."""
        tables = _by_table(search_space)
        count = math.prod(len(options) for options in tables.values())
        if count > self._max_proposals:
            logger.info("grid search skipped: %d combinations, more than %d", count, self._max_proposals)
            self._iterator, self._current = iter(()), None
            return
        self._iterator = itertools.product(*tables.values())
        self._current = next(self._iterator, None)

    def propose(self) -> list[ShardingOption] | None:
        """The next combination."""
        return list(self._current) if self._current else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on."""
        self._current = next(self._iterator, None)


class DynamicProgrammingProposer(Proposer):
    """Least total perf for each amount of total memory, by dynamic programming over memory bins.

    The first proposal is the plan of least memory; its feedback brings the topology. Then, for each bin from the largest
    amount of memory to the smallest, the plan of least total perf that uses that much: total memory does not say whether
    a plan can be placed, so all amounts are proposed. With ``ddr_bins_per_device`` the table is two-dimensional.

    Args:
        hbm_bins_per_device: bins of device memory a rank (of host memory when the topology has no device memory).
        ddr_bins_per_device: bins of host memory a rank, in addition; None plans by one memory only.
    """

    def __init__(self, hbm_bins_per_device: int = 100, ddr_bins_per_device: int | None = None) -> None:
        self._bins = max(hbm_bins_per_device, 1)
        self._ddr_bins = ddr_bins_per_device
        self._tables: ByTable = OrderedDict()
        self._planned = False
        self._proposals: list[list[int]] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Order each table's options by memory."""
        self._tables = _by_table(search_space)
        for options in self._tables.values():
            options.sort(key=lambda o: (o.total_storage.hbm, o.total_storage.ddr))
        self._planned, self._proposals = False, []

    def propose(self) -> list[ShardingOption] | None:
        """The plan of least memory, then the planned ones."""
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
        """Plan on the first call, which must bring the topology; then go on."""
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
            # The last writer of a cell wins: write from worst to best.
            order = np.argsort(-all_perf, kind="stable")
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


class EmbeddingOffloadScaleupProposer(Proposer):
    """Starts from the plan of least memory and spends what device memory is left on larger caches.

    Tables on a caching kernel get their cache grown in the order of how little cacheable they are per byte (their
    ``CacheParams.stats``); a cache that reaches the whole table becomes a table on the device. How much of the free
    memory to spend is searched, as a full device may not be placeable.

    Args:
        use_depth: rate options by their slowest shard.
    """

    _MAX_ROUNDS = 16

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth
        self._enumerator: Enumerator | None = None
        self._start: list[ShardingOption] = []
        self._on_device: dict[str, ShardingOption] = {}
        self._proposal: list[ShardingOption] | None = None
        self._search: LuusJaakolaSearch | None = None

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the least-memory option of every table, caching kernels first."""
        self._enumerator = enumerator
        self._start, self._on_device = [], {}
        for fqn, options in _by_table(search_space).items():
            caching = [o for o in options if o.compute_kernel.endswith("_uvm_caching")]
            least = min(caching or options, key=lambda o: (o.total_storage.hbm, _rating(o, self._use_depth)))
            self._start.append(least)
            device = [o for o in options if o.compute_kernel in ("fused", "quant")]
            same = [o for o in device if o.sharding_type == least.sharding_type]
            if same:
                self._on_device[fqn] = same[0]
        self._proposal, self._search = list(self._start) or None, None

    def propose(self) -> list[ShardingOption] | None:
        """The current plan."""
        return self._proposal

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Learn the budget from the first feedback, then search how much of it to spend."""
        scalable = [o for o in self._start if o.compute_kernel.endswith("_uvm_caching")]
        if self._proposal is None or self._enumerator is None or not scalable:
            self._proposal = None
            return
        if self._search is None:
            if storage_constraint is None:
                self._proposal = None
                return
            have = sum(d.storage.hbm for d in storage_constraint.devices)
            budget = have - sum(o.total_storage.hbm for o in self._start)
            if budget <= 0:
                self._proposal = None
                return
            cost = perf_rating if partitionable and perf_rating is not None else None
            self._search = LuusJaakolaSearch(0, float(budget), self._MAX_ROUNDS, left_cost=cost)
            spend = float(budget)  # the whole budget is the likeliest winner: try it first
            self._search.next(math.inf)
            self._search._x = spend
        else:
            value = perf_rating if partitionable and perf_rating is not None else math.inf
            next_spend = self._search.next(value)
            if next_spend is None:
                self._proposal = None
                return
            spend = next_spend
        self._proposal = self._scaled(spend)

    def _scaled(self, budget: float) -> list[ShardingOption]:
        """The start with ``budget`` bytes more cache, neediest tables first."""

        def need(o: ShardingOption) -> float:
            stats = o.cache_params.stats if o.cache_params is not None else None
            if stats is None:
                return 1.0
            return stats.cacheability * stats.expected_lookups / max(o.total_storage.ddr, 1)

        plan = {o.fqn: o for o in self._start}
        changed = []
        for option in sorted(self._start, key=lambda o: -need(o)):
            if not option.compute_kernel.endswith("_uvm_caching") or budget <= 0:
                continue
            table_bytes = option.total_storage.ddr
            have = option.cache_load_factor or 0.2
            grow = min(1.0 - have, budget / max(table_bytes, 1))
            budget -= grow * table_bytes
            whole = self._on_device.get(option.fqn)
            if have + grow >= 0.999 and whole is not None:
                plan[option.fqn] = whole
                continue
            scaled = copy.deepcopy(option)
            params = copy.copy(scaled.cache_params) if scaled.cache_params is not None else CacheParams()
            params.load_factor = have + grow
            scaled.cache_params = params
            plan[option.fqn] = scaled
            changed.append(scaled)
        if changed and self._enumerator is not None:
            self._enumerator.populate_estimates(changed)
        return list(plan.values())


def proposers_to_proposals_list(
    proposers_list: list[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """All distinct proposals of ``proposers_list``, told that every one of them could be placed."""
    found: list[list[ShardingOption]] = []
    seen: set[tuple[int, ...]] = set()
    for proposer in proposers_list:
        proposer.load(search_space)
        while (proposal := proposer.propose()) is not None:
            key = tuple(sorted(hash(o) for o in proposal))
            if key not in seen:
                seen.add(key)
                found.append(proposal)
            proposer.feedback(True)
    return found
