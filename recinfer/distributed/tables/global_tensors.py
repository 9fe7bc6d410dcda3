"""ShardedTensors or DTensors for state dicts, from all ranks' shards of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

__all__ = ["dtensor_of", "global_tensor"]


def global_tensor(
    local: Sequence[tuple[Tensor, ShardMetadata]],
    whole: ShardedTensorMetadata,
    pg: dist.ProcessGroup,
    mesh: DeviceMesh | None = None,
) -> ShardedTensor | DTensor:
    """The tensor described by ``whole``, from this rank's shards, which are not copied.

    Args:
        local: shards on this rank and their metadata; may be empty.
        whole: all ranks' rectangles.
        pg: the ranks.
        mesh: the same ranks as a mesh, to make a DTensor.
    """
    if mesh is None:
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local_shards=[Shard(tensor, place) for tensor, place in local],
            sharded_tensor_metadata=whole,
            process_group=pg,
        )
    return dtensor_of([(t, tuple(place.shard_offsets)) for t, place in local], whole.size, mesh, _placement(whole))


def dtensor_of(
    local: Sequence[tuple[Tensor, tuple[int, ...]]], size: torch.Size, mesh: DeviceMesh, placement: Placement
) -> DTensor:
    """A DTensor over arbitrary rectangles, which its local part describes."""
    wrapped = LocalShardsWrapper([tensor for tensor, _ in local], [offsets for _, offsets in local])
    stride = (size[1], 1) if len(size) == 2 else (1,)
    return DTensor.from_local(wrapped, mesh, [placement], run_check=False, shape=size, stride=stride)


def _placement(whole: ShardedTensorMetadata) -> Placement:
    """The placement of ``whole`` by rows or by columns, as in TorchRec; a table on one rank counts as replicated, and
    state of one number per row as by rows."""
    shards = whole.shards_metadata
    if len(whole.size) == 1:
        return ShardPlacement(0)
    if len(shards) == 1:
        return Replicate()
    return ShardPlacement(0 if len({s.shard_offsets[1] for s in shards}) == 1 else 1)
