"""Updates of replicated tables: ranks exchange ids and output gradients instead of whole table gradients.

Shapes: ``W`` ranks, ``T`` features, ``B`` bags per feature on one rank (ranks may differ), ``N`` ids of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.comm.transport import start_all_gather

__all__ = ["LookupGradient", "Replicas"]


class LookupGradient(NamedTuple):
    """A lookup and the gradient of its output.

    Attributes:
        indices: ``[N]``, feature by feature.
        offsets: ``[T * B + 1]``.
        per_sample_weights: float32 ``[N]``, or None.
        grad_output: ``[B, D]``, or ``[N, D]`` unpooled.
    """

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    grad_output: Tensor


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same tables.

    Attributes:
        pg: their process group.
    """

    pg: dist.ProcessGroup

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the values of the group's first rank."""
        source = dist.get_global_rank(self.pg, 0)
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(tensor, src=source, group=self.pg)

    def gather(self, local: LookupGradient, num_features: int, pooled: bool) -> LookupGradient:
        """Gather the lookups of all ranks into one, with the gradients divided by ``W``.

        The update equals that of the mean of the ranks' table gradients. Two collectives exchange the sizes, and a
        tensor of bytes per rank.
        """
        world = self.pg.size()
        if world == 1:
            return local
        num_bags, num_ids = (local.offsets.numel() - 1) // num_features, local.indices.numel()
        mine = torch.tensor([num_bags, num_ids], device=local.indices.device)
        sizes = start_all_gather(self.pg, mine, [2] * world).wait()
        layouts = [_Layout(local, num_features, pooled, bags, ids) for bags, ids in sizes.view(world, 2).tolist()]
        width = max(8, *(layout.num_bytes for layout in layouts))
        sent = torch.empty(width, dtype=torch.uint8, device=local.indices.device)
        layouts[dist.get_rank(self.pg)].write(sent, local)
        received = start_all_gather(self.pg, sent, [width] * world).wait()
        parts = [layout.read(row) for layout, row in zip(layouts, received.view(world, width))]
        return _joined(parts, num_features, pooled, world)


class _Layout:
    """Offsets of ids, lengths, weights and gradients in the bytes of one rank's lookup."""

    def __init__(self, like: LookupGradient, num_features: int, pooled: bool, num_bags: int, num_ids: int) -> None:
        weights = 0 if like.per_sample_weights is None else num_ids
        self.parts = [
            (like.indices.dtype, (num_ids,)),
            (torch.int32, (num_features * num_bags,)),
            (torch.float32, (weights,)),
            (like.grad_output.dtype, (num_bags if pooled else num_ids, like.grad_output.shape[1])),
        ]
        self.has_weights = like.per_sample_weights is not None
        self.ends, at = [], 0
        for dtype, shape in self.parts:
            at += -at % 8 + dtype.itemsize * int(torch.Size(shape).numel())
            self.ends.append(at)
        self.num_bytes = at + -at % 8

    def _views(self, row: Tensor) -> list[Tensor]:
        views = []
        for (dtype, shape), end in zip(self.parts, self.ends):
            size = dtype.itemsize * int(torch.Size(shape).numel())
            views.append(row[end - size : end].view(dtype).view(shape))
        return views

    def write(self, row: Tensor, lookup: LookupGradient) -> None:
        weights = lookup.per_sample_weights
        sources = (lookup.indices, lookup.offsets.diff(), weights, lookup.grad_output)
        for view, source in zip(self._views(row), sources):
            if source is not None:
                view.copy_(source)

    def read(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        ids, lengths, weights, gradients = self._views(row)
        return ids, lengths, weights if self.has_weights else None, gradients


def _joined(
    parts: list[tuple[Tensor, Tensor, Tensor | None, Tensor]], num_features: int, pooled: bool, world: int
) -> LookupGradient:
    """Reorder from rank by rank to feature by feature, then rank by rank."""
    ids = torch.cat([p[0] for p in parts])
    lengths_per_rank = [p[1].view(num_features, -1) for p in parts]
    lengths = torch.cat(lengths_per_rank, dim=1).reshape(-1)
    offsets = ids.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    # Ids of feature f from rank r: their current position and number.
    counts_WT = torch.stack([lengths.sum(dim=1) for lengths in lengths_per_rank]).to(torch.int64)
    starts_WT = (counts_WT.view(-1).cumsum(0) - counts_WT.view(-1)).view_as(counts_WT)
    counts, starts = counts_WT.t().reshape(-1), starts_WT.t().reshape(-1)
    shift = torch.repeat_interleave(starts - (counts.cumsum(0) - counts), counts)
    order = shift + torch.arange(shift.numel(), device=shift.device)
    weights = [p[2] for p in parts if p[2] is not None]
    gradients = torch.cat([p[3] for p in parts]).div_(world)
    return LookupGradient(
        ids[order],
        offsets,
        torch.cat(weights)[order] if weights else None,
        gradients if pooled else gradients[order],
    )
