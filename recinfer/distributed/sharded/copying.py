"""Deep copies to another device that share process groups and preserve shared storages and sharded tensors.

``copy.deepcopy`` looks up every object in its memo before it copies it. The memo here has entries for all tensors,
process groups and meshes in the copied value, so no class of torch has to be patched.
"""

from __future__ import annotations

import copy
import gc
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from recinfer import fbgemm
from recinfer.distributed.tables.global_tensors import dtensor_of
from recinfer.optim.local_tensors import local_pieces

__all__ = ["copied_to", "module_copies_go_to", "sharded_model_copy"]

T = TypeVar("T")
_SHARED = (dist.ProcessGroup, DeviceMesh)
# Objects with their own __deepcopy__ are copied by it; their contents are in the memo.
_COPIERS = (Tensor.__deepcopy__, nn.Parameter.__deepcopy__)
# Types that deepcopy does not copy.
_PROGRAM = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType)


def copied_to(value: T, device: torch.device | None) -> T:
    """A deep copy of ``value`` that shares process groups and meshes, with its tensors on ``device``; None shares them
    too.

    Tensors that share a storage share one in the copy too.
    """
    return copy.deepcopy(value, _Memo(value, device))


class _Memo(dict[int, Any]):
    """The memo of deepcopy (id of an object -> its copy), which creates the copies of known objects on demand."""

    def __init__(self, value: object, device: torch.device | None) -> None:
        super().__init__()
        self._device = device
        # References keep the objects alive, so that no other object gets their ids.
        self._known = {id(each): each for each in _reachable(value) if _is_known(each)}
        self._storages: dict[int, Tensor] = {}  # original storage -> copy

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._known and key not in self:
            known = self._known[key]
            if self._device is None or isinstance(known, _SHARED):
                self[key] = known
            else:
                self._move(cast("Tensor", known), self._device)
        return super().get(key, default)

    def _move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy ``tensor`` to ``device`` and enter the copy in the memo."""
        if id(tensor) in self:
            return self[id(tensor)]
        moved: Any
        self._known[id(tensor)] = tensor
        if isinstance(tensor, ShardedTensor):
            shards = [Shard(self._move(s.tensor, device), copy.deepcopy(s.metadata)) for s in tensor.local_shards()]
            moved = ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, copy.deepcopy(tensor.metadata()), process_group=tensor._process_group
            )
        elif isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, LocalShardsWrapper):
            pieces = [(self._move(rows, device), at) for rows, at in local_pieces(tensor)]
            moved = dtensor_of(pieces, tensor.size(), tensor.device_mesh, tensor.placements[0])
        elif tensor.is_meta:
            moved = tensor.detach().clone()
        elif tensor.is_sparse:
            moved = tensor.detach().to(device, copy=True)
        else:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._storages[storage._cdata] = _copy_of(flat, device)
            moved = torch.empty(0, dtype=tensor.dtype, device=device)
            moved.set_(
                self._storages[storage._cdata].untyped_storage(),
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            moved.requires_grad_()  # fused lookups need a tensor with requires_grad to run their backward
        self[id(tensor)] = moved
        if isinstance(tensor, nn.Parameter):
            moved.__dict__.update({name: copy.deepcopy(each, self) for name, each in tensor.__dict__.items()})
        return moved


def _copy_of(flat: Tensor, device: torch.device) -> Tensor:
    """A copy of ``flat`` on ``device``; the copy of memory on the host that a GPU reads (FBGEMM's UVM) is such memory
    too."""
    if fbgemm.HAS_CUDA and flat.is_cuda and device.type == "cuda" and torch.ops.fbgemm.is_uvm_tensor(flat):
        like = torch.empty(0, dtype=flat.dtype, device=device)
        return torch.ops.fbgemm.new_unified_tensor(like, [flat.numel()], False).copy_(flat)  # type: ignore[no-any-return]
    return flat.to(device, copy=True)


def _is_known(value: object) -> bool:
    return isinstance(value, _SHARED) or (isinstance(value, Tensor) and type(value).__deepcopy__ in _COPIERS)


def _reachable(value: object) -> Iterator[object]:
    """``value`` and all objects that it refers to, a superset of the objects that deepcopy visits."""
    seen: set[int] = set()
    ahead = [value]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or issubclass(type(each), _PROGRAM):
            continue
        seen.add(id(each))
        yield each
        if not isinstance(each, _SHARED):
            ahead += gc.get_referents(each)


# ------------------------------------------------------------------------------- copies that others ask deepcopy for

_target: ContextVar[tuple[torch.device | None] | None] = ContextVar("recinfer_copies_go_to", default=None)
_inside, _lock = 0, threading.Lock()


@contextmanager
def module_copies_go_to(device: torch.device | None) -> Iterator[None]:
    """Context manager in which ``copy.deepcopy`` of a module is :func:`copied_to` ``device``, in this thread (or task)
    only."""
    global _inside
    with _lock:
        _inside += 1
        nn.Module.__deepcopy__ = _copied_module  # type: ignore[attr-defined]
    token = _target.set((device,))
    try:
        yield
    finally:
        _target.reset(token)
        with _lock:
            _inside -= 1
            if not _inside:
                del nn.Module.__deepcopy__  # type: ignore[attr-defined]


def _copied_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The modules' __deepcopy__ while a thread is in the context manager; in other threads it copies as usual."""
    target = _target.get()
    if target is None or isinstance(memo, _Memo):
        return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined,no-any-return]
    return copied_to(module, *target)


@contextmanager
def sharded_model_copy(device: torch.device | str | int | None) -> Iterator[None]:
    """Context manager in which ``copy.deepcopy`` of a sharded model puts tensors on ``device`` and shares process
    groups. Other threads are not affected.

    Args:
        device: None shares the tensors too, and copies only the modules.

    For a DistributedModelParallel its own ``copy(device)`` does the same and leaves DistributedDataParallel out.

    Example::

        with sharded_model_copy("cpu"):
            on_cpu = copy.deepcopy(dmp.module)
    """
    with module_copies_go_to(None if device is None else torch.device(device)):
        yield
