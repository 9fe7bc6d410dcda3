"""Determines the device that a process group's ranks compute on, and whether NCCL moves their tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recinfer import env

__all__ = ["group_device", "has_nccl"]


def has_nccl(pg: dist.ProcessGroup) -> bool:
    """Whether NCCL moves the group's tensors on GPUs.

    This reads the config instead of ``get_backend``: after a bare ``init_process_group()``, which gives gloo and NCCL,
    that is "undefined".
    """
    return "nccl" in dist.get_backend_config(pg)


def group_device(pg: dist.ProcessGroup) -> torch.device:
    """This process's GPU if the group has NCCL and there is a GPU, else the CPU.

    The GPU is the one that ``init_process_group(device_id=...)`` or ``torch.cuda.set_device`` named, else that of the
    local rank.
    """
    if not (has_nccl(pg) and torch.cuda.is_available()):
        return torch.device("cpu")
    if pg.bound_device_id is not None:
        return pg.bound_device_id
    index = torch.cuda.current_device()
    if index == 0:  # the default; also right for local rank 0 and for a process with only one visible GPU
        index = dist.get_rank() % env.local_world_size(dist.get_world_size()) % torch.cuda.device_count()
    return torch.device("cuda", index)
