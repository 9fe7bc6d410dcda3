"""The partitioner: it assigns the shards of a proposal to ranks, greedily by load."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

import numpy as np

from recinfer.distributed.planner.interfaces import Partitioner
from recinfer.distributed.planner.model.constraints import PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology, tier_bytes
from recinfer.distributed.planner.solve.placing import Placement, Placer
from recinfer.distributed.planner.solve.problem import FIXED, FREE, HOST, HOST_FREE, MULTI_HOST, Problem, problem_of
from recinfer.distributed.types.sharding_types import PartitionByType
from recinfer.distributed.types.tiers import TIER_NAMES, TIERS
from recinfer.sizes import exact_size

__all__ = ["GreedyPerfPartitioner", "SortBy"]


class SortBy(Enum):
    """The figure by which options are sorted."""

    STORAGE = "storage"
    PERF = "perf"


def _mode(option: ShardingOption, local_world_size: int) -> int:
    by = option.partition_by
    if by == PartitionByType.UNIFORM.value:
        return FIXED
    if by == PartitionByType.HOST.value:
        rows = {tuple(s.offset)[1] for s in option.shards} == {0} and option.num_shards == local_world_size
        return HOST if rows else HOST_FREE
    if by == PartitionByType.MULTI_HOST.value:
        return MULTI_HOST
    if by == PartitionByType.DEVICE.value:
        return FREE
    raise PlannerError(
        f"table {option.fqn!r}: partition_by {by!r}; expected one of {[t.value for t in PartitionByType]}",
        PlannerErrorType.PARTITION,
    )


def proposal_problem(proposal: list[ShardingOption], topology: Topology) -> tuple[Problem, list[list[int]]]:
    """The proposal as a problem with one option per unit, and the options of each unit (several when they depend)."""
    mates: dict[str, list[int]] = defaultdict(list)
    for i, option in enumerate(proposal):
        mates[option.dependency if option.dependency is not None else f"#{i}"].append(i)
    units = list(mates.values())
    perf, num_bytes, fixed, modes, counts = [], [], [], [], []
    for members in units:
        first = proposal[members[0]]
        if len({proposal[m].num_shards for m in members}) > 1:
            names = [proposal[m].fqn for m in members]
            raise PlannerError(f"{names} depend on each other but have different numbers of shards", PlannerErrorType.PARTITION)  # fmt: skip
        mode = _mode(first, topology.local_world_size)
        if mode == FIXED and first.num_shards != topology.world_size:
            raise PlannerError(
                f"table {first.fqn!r} is partitioned uniformly with {first.num_shards} shards; expected one for each "
                f"of {topology.world_size} ranks",
                PlannerErrorType.PARTITION,
            )
        modes.append(mode)
        counts.append(first.num_shards)
        for i in range(first.num_shards):
            shards = [proposal[m].shards[i] for m in members]
            assert all(s.perf is not None and s.storage is not None for s in shards), (
                "the proposal has no estimates; run the estimators on it first"
            )
            perf.append(sum(s.perf.total for s in shards if s.perf))
            num_bytes.append([sum(amounts) for amounts in zip(*(tier_bytes(s.storage) for s in shards if s.storage))])
            fixed.append(i if mode == FIXED else -1)
    shard_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    problem = problem_of(
        np.arange(len(units) + 1),
        np.array(modes, np.int64),
        shard_ptr,
        (np.array(perf, float), np.array(num_bytes, float).reshape(-1, len(TIERS)).T),
        np.array(fixed, np.int64),
        topology,
    )
    return problem, units


class GreedyPerfPartitioner(Partitioner):
    """Places uniform options first, then options bound to hosts, then single shards, each on the least loaded rank with
    enough free memory.

    Args:
        sort_by: place large options first, by storage or by perf.
        balance_modules: place module by module, modules with fewer options first, so that each module is spread evenly.
    """

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._sort_by = sort_by
        self._balance_modules = balance_modules

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """``proposal`` with ranks, in place.

        Args:
            proposal: estimated options.
            storage_constraint: topology; not changed.

        Raises:
            PlannerError: it does not fit; the message names the table and what is left.
        """
        if not proposal:
            return proposal
        problem, units = proposal_problem(proposal, storage_constraint)
        placed = self._place(problem, units, proposal)
        for unit, members in enumerate(units):
            for m in members:
                for shard, rank in zip(proposal[m].shards, placed.ranks[unit].tolist()):
                    shard.rank = rank
        return proposal

    def _place(self, problem: Problem, units: list[list[int]], proposal: list[ShardingOption]) -> Placement:
        placer = Placer(problem)
        at = placer.empty()
        for unit in self._order(problem, units, proposal):
            ranks = placer.find(at, unit)
            if ranks is None:
                option = proposal[units[unit][0]]
                largest = problem.bytes[:, problem.shards_of(unit)].max(axis=1)
                left = (problem.caps - at.used).max(axis=1)
                need = " and ".join(f"{exact_size(size)} of {name}" for size, name in zip(largest, TIER_NAMES))
                raise PlannerError(
                    f"table {option.fqn!r} ({option.sharding_type}/{option.compute_kernel}) fits on no rank: its "
                    f"largest shard needs {need}, the rank with the most free memory has "
                    f"{' and '.join(map(exact_size, left))} left",
                    PlannerErrorType.PARTITION,
                )
            placer.put(at, unit, unit, ranks)
        return at

    def _order(self, problem: Problem, units: list[list[int]], proposal: list[ShardingOption]) -> list[int]:
        if self._sort_by == SortBy.PERF:
            size = problem.option_perf
        else:
            size = problem.option_bytes.sum(axis=0)
        rigid = np.array([2, 0, 1, 1, 1])[problem.mode]
        crowd: dict[str, int] = defaultdict(int)
        for members in units:
            crowd[proposal[members[0]].path] += 1
        per_unit = [crowd[proposal[m[0]].path] if self._balance_modules else 0 for m in units]
        paths = [proposal[m[0]].path if self._balance_modules else "" for m in units]
        return sorted(range(len(units)), key=lambda u: (rigid[u], per_unit[u], paths[u], -size[u], u))
