"""The output exchange of tables whose row pieces share a host: sums inside each host first, then an exchange between
hosts.

Each vector is sent between hosts once, not once for every rank of the host.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.comm.ranks import get_local_size, intra_and_cross_node_pg
from recinfer.distributed.exchange.combine import ColumnPlan, Sum
from recinfer.distributed.exchange.outputs import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from recinfer.distributed.exchange.pooled import PooledContext, ShardPooledDist, keep_in_graph
from recinfer.distributed.tables.slots import ShardLayout, tiling_of
from recinfer.distributed.types import Awaitable, QuantizedCommCodecs
from recinfer.distributed.types.shardings import EmbeddingShardingInfo

__all__ = ["HostPooledDist", "summed_inside_hosts"]


def summed_inside_hosts(info: EmbeddingShardingInfo, world_size: int) -> bool:
    """Whether there are several hosts with several ranks, and each strip of the table has rows on all ranks of one
    host."""
    local_size = get_local_size(world_size)
    if not 1 < local_size < world_size or world_size % local_size:
        return False
    columns = [sorted(rect.rank for rect in strip.rects) for strip in tiling_of(info, world_size).strips]
    return all(
        ranks == list(range(ranks[0], ranks[0] + local_size)) and ranks[0] % local_size == 0 for ranks in columns
    )


class HostPooledDist(ShardPooledDist):
    """Reduce-scatter inside each host, then all-to-all between ranks of the same local rank.

    With a variable batch per feature it is the same as ShardPooledDist.

    Args:
        layout: the slots, of tables that are :func:`summed_inside_hosts`.
        pg: the ranks, all of the default group.
        device: device of the buffers.
        inside: codecs of the reduce-scatter.
        between: codecs of the all-to-all.
    """

    def __init__(
        self,
        layout: ShardLayout,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
        inside: QuantizedCommCodecs | None = None,
        between: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(layout, pg, device, between)
        intra, cross = intra_and_cross_node_pg(device)
        assert intra is not None
        assert cross is not None
        self._local_size = intra.size()
        self._num_hosts = cross.size()
        self._local_rank = dist.get_rank(intra)
        self._reduce = PooledEmbeddingsReduceScatter(intra, codecs=inside)
        starts = [0, *accumulate(layout.slots_per_rank)]
        widths: list[int] = []
        place: dict[int, int] = {}  # slot of a host's first rank -> column of the host's sums
        per_host = []
        for first in range(0, layout.world_size, self._local_size):
            slots = range(starts[first], starts[first + 1])
            place |= {slot: len(widths) + i for i, slot in enumerate(slots)}
            per_host.append(sum(layout.widths[slot] for slot in slots))
            widths += [layout.widths[slot] for slot in slots]
        self._between = PooledEmbeddingsAllToAll(cross, per_host, device, codecs=between)
        sums = [
            Sum((next(place[slot] for slot in each.sources if slot in place),), each.divisor)
            for sums in self._outputs
            for each in sums
        ]
        self._from_hosts = ColumnPlan(widths, sums)

    def forward(self, local_embs: Tensor, sharding_ctx: PooledContext | None = None) -> Awaitable[Tensor]:
        """Start the exchange; see :meth:`ShardPooledDist.forward`."""
        ctx = sharding_ctx if sharding_ctx is not None else PooledContext()
        if ctx.variable_batch_per_feature:
            return super().forward(local_embs, ctx)
        batches = ctx.batch_size_per_rank
        # Examples for the first rank of every host, then for the second ...: each local rank adds up its own.
        order = [r for place in range(self._local_size) for r in range(place, len(batches), self._local_size)]
        parts = keep_in_graph(local_embs, ctx.weights).split(batches)
        by_place = torch.cat([parts[rank] for rank in order])
        of_place = [sum(batches[place :: self._local_size]) for place in range(self._local_size)]
        return _BetweenHosts(self._reduce(by_place, of_place), self, ctx)

    def between(self, reduced: Tensor, ctx: PooledContext) -> Tensor:
        """Sums of a host, ``[B of this place on all hosts, columns of the host]`` -> this rank's outputs."""
        batches = ctx.batch_size_per_rank[self._local_rank :: self._local_size]
        return self._from_hosts(self._between(reduced, batches).wait(), ctx.divisors)


class _BetweenHosts(Awaitable[Tensor]):
    """Awaitable of the sums inside the host, followed by the exchange between hosts."""

    def __init__(self, inside: Awaitable[Tensor], output_dist: HostPooledDist, ctx: PooledContext) -> None:
        super().__init__()
        self._inside = inside
        self._output_dist = output_dist
        self._ctx = ctx

    def _wait_impl(self) -> Tensor:
        return self._output_dist.between(self._inside.wait(), self._ctx)
