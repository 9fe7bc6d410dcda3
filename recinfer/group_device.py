"""Determines the device that a process group's ranks compute on, and whether NCCL moves their tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recinfer import env
from recinfer.errors import ConfigError, UnavailableError

__all__ = ["check_devices", "device_and_backend", "group_device", "has_nccl"]


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


def device_and_backend(kind: str, rank: int = 0, world_size: int = 1) -> tuple[torch.device, str]:
    """Where a rank that asks for ``kind`` computes, and the backend of its process group.

    ``cpu`` with gloo; ``cuda``: the GPU of the local rank, with NCCL for tensors on it and gloo for those on the host.

    Raises:
        UnavailableError: there is no GPU, or no NCCL; says which torch was found.
    """
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    _check_cuda(several=world_size > 1)
    index = rank % env.local_world_size(world_size) % torch.cuda.device_count()
    return torch.device("cuda", index), "cpu:gloo,cuda:nccl"


def check_devices(kind: str, world_size: int) -> None:
    """Refuse ``world_size`` ranks on this host that it has no devices for; for who starts them, before they start.

    Raises:
        UnavailableError: as :func:`device_and_backend`.
        ConfigError: fewer GPUs than ranks.
    """
    if kind == "cpu":
        return
    _check_cuda(several=world_size > 1)
    gpus = torch.cuda.device_count()
    if gpus < world_size:
        raise ConfigError(
            f"--device cuda: {world_size} ranks, and torch sees {gpus} GPU{'s' * (gpus != 1)} on this host; each rank needs "
            f"a GPU of its own: give --world-size {gpus} or less"
        )


def _check_cuda(*, several: bool) -> None:
    if torch.version.cuda is None:
        raise UnavailableError(
            f"--device cuda needs a CUDA build of torch; found torch {torch.__version__}. Install recinfer[cuda] on a machine "
            "with a GPU, or leave --device cuda out"
        )
    if not torch.cuda.is_available():
        raise UnavailableError(
            f"--device cuda needs a GPU; torch {torch.__version__} sees none: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if several and not dist.is_nccl_available():
        raise UnavailableError(f"several ranks on GPUs need NCCL, which torch {torch.__version__} was built without")
