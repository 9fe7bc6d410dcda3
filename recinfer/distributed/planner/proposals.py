"""Helpers of proposers: the options of each table, their ratings, and a base for proposals that are prepared in
advance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from recinfer.distributed.planner.interfaces import Proposer
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology

__all__ = ["ByTable", "PreparedProposer", "by_table", "rating"]

ByTable = OrderedDict[str, list[ShardingOption]]


def by_table(search_space: list[ShardingOption]) -> ByTable:
    """The options of every table, in their order."""
    tables: ByTable = OrderedDict()
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def _depth(option: ShardingOption) -> float:
    """Milliseconds of the slowest shard."""
    return max(s.perf.total for s in option.shards if s.perf is not None)


def rating(option: ShardingOption, use_depth: bool) -> float:
    """Milliseconds of an option's slowest shard, or the sum over its shards."""
    return _depth(option) if use_depth else option.total_perf


class PreparedProposer(Proposer):
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
