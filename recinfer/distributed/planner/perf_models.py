"""The rating of a placed plan; lower is better."""

from __future__ import annotations

import numpy as np

from recinfer.distributed.planner.interfaces import PerfModel
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology

__all__ = ["NoopPerfModel"]


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
