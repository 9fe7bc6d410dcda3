"""Gets the local shards of a ShardedTensor, DTensor or plain tensor, with their offsets."""

from __future__ import annotations

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["local_pieces", "local_tensors"]


def local_pieces(value: Tensor | ShardedTensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The local rectangles of ``value`` with their offsets; views, without autograd.

    A DTensor of a sharded table may have several rectangles on a rank, or none.
    """
    if isinstance(value, ShardedTensor):
        return [(shard.tensor.detach(), tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
    if isinstance(value, DTensor):
        local = value._local_tensor  # to_local() of a DTensor that needs gradients would be a view in the graph
        if isinstance(local, LocalShardsWrapper):
            return [(rows.detach(), tuple(at)) for rows, at in zip(local.local_shards(), local.local_offsets())]
        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        return [(local.detach(), tuple(offsets))]
    return [(value.detach(), (0,) * value.dim())]


def local_tensors(value: Tensor | ShardedTensor) -> list[Tensor]:
    """The local rectangles of ``value``, without offsets."""
    return [piece for piece, _ in local_pieces(value)]
