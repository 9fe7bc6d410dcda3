"""The proposer that spends free device memory on larger caches."""

from __future__ import annotations

import copy
import math

from recinfer.distributed.planner.interfaces import Enumerator, Proposer
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.proposals import by_table, rating
from recinfer.distributed.planner.utils import LuusJaakolaSearch
from recinfer.distributed.types import CacheParams

__all__ = ["EmbeddingOffloadScaleupProposer"]


class EmbeddingOffloadScaleupProposer(Proposer):
    """Starts from the plan with the least memory and spends the remaining device memory on larger caches.

    Caches grow in order of their tables' miss rate per byte (their
    ``CacheParams.stats``); a table whose cache would hold all its rows is placed on the device. The share of the free
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
        """Take the option with the least memory of every table, caching kernels first."""
        self._enumerator = enumerator
        self._start, self._on_device = [], {}
        for fqn, options in by_table(search_space).items():
            caching = [o for o in options if o.compute_kernel.endswith("_uvm_caching")]
            least = min(caching or options, key=lambda o: (o.total_storage.hbm, rating(o, self._use_depth)))
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
            spend = float(budget)  # the whole budget comes first, because it is most likely the best
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
