"""TorchRec's proposers: strategies that propose one option per table in each round."""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict

from recinfer.distributed.planner.dynamic_programming import DynamicProgrammingProposer
from recinfer.distributed.planner.interfaces import Enumerator, Proposer
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.offload_scaleup import EmbeddingOffloadScaleupProposer
from recinfer.distributed.planner.proposals import ByTable, PreparedProposer, by_table, rating

__all__ = [
    "DynamicProgrammingProposer",
    "EmbeddingOffloadScaleupProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]

logger = logging.getLogger(__name__)


class GreedyProposer(Proposer):
    """Starts with every table's fastest option; each round gives the table that uses most memory its next option.

    Args:
        use_depth: rate options by their slowest shard; otherwise by the sum over shards.
        threshold: stop after this many proposals in a row that are no better than the best so far.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth = use_depth
        self._threshold = threshold
        self._tables: ByTable = OrderedDict()
        self._at: dict[str, int] = {}
        self._done = True
        self._best = math.inf
        self._worse_in_a_row = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Sort the options of each table by perf."""
        self._tables = by_table(search_space)
        for options in self._tables.values():
            options.sort(key=lambda o: rating(o, self._use_depth))
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

        def usage(fqn: str) -> tuple[int, int]:
            storages = [s.storage for s in self._tables[fqn][self._at[fqn]].shards if s.storage is not None]
            return max(s.hbm for s in storages), max(s.ddr for s in storages)

        self._at[max(movable, key=usage)] += 1


class UniformProposer(PreparedProposer):
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
        tables = by_table(search_space)
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
                plan.append(min(fits, key=lambda o: rating(o, self._use_depth)))
            key = tuple(id(o) for o in plan)
            if len(plan) == len(tables) and key not in seen:
                seen.add(key)
                proposals.append(plan)
        self._prepare(proposals)


class GridSearchProposer(PreparedProposer):
    """Proposes every combination if there are at most ``max_proposals``; otherwise none.

    Args:
        max_proposals: limit.
    """

    def __init__(self, max_proposals: int = 10_000) -> None:
        super().__init__()
        self._max_proposals = max_proposals

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Start over."""
        tables = by_table(search_space)
        count = math.prod(len(options) for options in tables.values())
        if count > self._max_proposals:
            logger.info("grid search skipped: %d combinations, more than %d", count, self._max_proposals)
            self._prepare(())
            return
        self._prepare(list(combination) for combination in itertools.product(*tables.values()) if combination)


def proposers_to_proposals_list(
    proposers_list: list[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """All distinct proposals of ``proposers_list``, which get the feedback that each proposal can be placed."""
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
