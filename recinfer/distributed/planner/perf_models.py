"""Ratings of a placed plan; lower is better."""

from __future__ import annotations

import numpy as np

from recinfer.distributed.planner.interfaces import PerfModel
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology

__all__ = ["NoopPerfModel", "NoopStorageModel"]


class NoopPerfModel(PerfModel):
    """Rates a plan by the milliseconds of its busiest rank: the sum of its shards' total perf."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """The largest sum over ranks."""
        load = np.zeros(self._topology.world_size)
        for option in plan:
            for shard in option.shards:
                if shard.rank is not None and shard.perf is not None:
                    load[shard.rank] += shard.perf.total
        return float(load.max())


class NoopStorageModel(PerfModel):
    """Rates a plan by the bytes of its fullest rank: of device memory if there is any, else of host memory."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """The largest sum over ranks."""
        used = np.zeros((2, self._topology.world_size))
        for option in plan:
            for shard in option.shards:
                if shard.rank is not None and shard.storage is not None:
                    used[:, shard.rank] += (shard.storage.hbm, shard.storage.ddr)
        return float((used[0] if used[0].any() else used[1]).max())
