"""Deep copies to another device that keep process groups, shared storages and sharded tensors what they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from recinfer.distributed.global_tensors import dtensor_of
from recinfer.optim.local_tensors import local_pieces

__all__ = ["copying_to"]


@contextmanager
def copying_to(device: torch.device | None) -> Iterator[None]:
    """Inside, ``copy.deepcopy`` shares process groups and puts tensors on ``device`` as it copies them.

    With None it shares tensors as well.
    """

    def same(shared: Any, memo: dict[int, Any]) -> Any:
        return shared

    storages: dict[int, Tensor] = {}  # by the storage copied from: tensors that share one still do afterwards

    def tensor_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) in memo:
            return memo[id(tensor)]
        if isinstance(tensor, ShardedTensor):
            shards = [Shard(tensor_copy(s.tensor, memo), copy.deepcopy(s.metadata)) for s in tensor.local_shards()]
            moved: Any = ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, copy.deepcopy(tensor.metadata()), process_group=tensor._process_group
            )
            memo[id(tensor)] = moved
            return moved
        if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, LocalShardsWrapper):
            pieces = [(tensor_copy(rows, memo), at) for rows, at in local_pieces(tensor)]
            moved = dtensor_of(pieces, tensor.size(), tensor.device_mesh, tensor.placements[0])
            memo[id(tensor)] = moved
            return moved
        if tensor.is_meta or tensor.is_sparse:
            moved = tensor.detach().clone() if tensor.is_meta else tensor.detach().to(device, copy=True)
        else:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                storages[storage._cdata] = flat.to(device, copy=True)
            moved = torch.empty(0, dtype=tensor.dtype, device=device)
            moved.set_(
                storages[storage._cdata].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            moved.__dict__.update({k: copy.deepcopy(v, memo) for k, v in tensor.__dict__.items()})
        elif tensor.requires_grad and tensor.is_leaf:
            moved.requires_grad_()  # fused lookups hang on such a tensor: without it their backward would not run
        memo[id(tensor)] = moved
        memo.setdefault(id(memo), []).append(tensor)  # alive as long as its id is a key
        return moved

    before_tensor, before_parameter = Tensor.__deepcopy__, nn.Parameter.__deepcopy__
    shared: list[Any] = [dist.ProcessGroup, DeviceMesh]
    Tensor.__deepcopy__ = nn.Parameter.__deepcopy__ = same if device is None else tensor_copy  # type: ignore[method-assign,assignment]
    for kind in shared:
        kind.__deepcopy__ = same
    try:
        yield
    finally:
        Tensor.__deepcopy__, nn.Parameter.__deepcopy__ = before_tensor, before_parameter  # type: ignore[method-assign]
        for kind in shared:
            del kind.__deepcopy__
