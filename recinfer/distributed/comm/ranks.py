"""Positions of ranks in their hosts, and process groups inside hosts and across hosts.

Ranks are numbered host by host, ``local_size`` on each, as torchrun numbers them: rank = group rank * local size +
    local rank.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from recinfer import env
from recinfer.errors import InputError, UnavailableError

__all__ = [
    "divide_cores",
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_num_groups",
    "intra_and_cross_node_pg",
]


def _world_size(world_size: int | None) -> int:
    if world_size is not None:
        return world_size
    if dist.is_initialized():
        return dist.get_world_size()
    started = env.torchrun_rank()
    if started is None:
        raise UnavailableError("no process group and no WORLD_SIZE; start with torchrun, or pass world_size")
    return started[1]


def _rank(rank: int | None, world_size: int) -> int:
    if rank is None:
        if dist.is_initialized():
            rank = dist.get_rank()
        else:
            started = env.torchrun_rank()
            if started is None:
                raise UnavailableError("no process group and no RANK; start with torchrun, or pass rank")
            rank = started[0]
    if not 0 <= rank < world_size:
        raise InputError(f"rank {rank} with {world_size} ranks; expected 0 to {world_size - 1}")
    return rank


def get_local_size(world_size: int | None = None) -> int:
    """Ranks on each host: LOCAL_WORLD_SIZE when ``world_size`` (default: the process group's) divides by it, else all.

    Raises:
        UnavailableError: no ``world_size``, and neither a process group nor torchrun's variables.
    """
    world_size = _world_size(world_size)
    local_size = env.local_world_size(world_size)
    return local_size if world_size % local_size == 0 else world_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Index of a rank (default: this one) among the ranks of its host, from 0."""
    world_size = _world_size(world_size)
    return _rank(rank, world_size) % get_local_size(world_size)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Index of the host of a rank (default: this one), from 0."""
    world_size = _world_size(world_size)
    return _rank(rank, world_size) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Number of hosts."""
    world_size = _world_size(world_size)
    return world_size // get_local_size(world_size)


def divide_cores() -> None:
    """Limit torch's threads to this rank's share of the cores if the ranks of a host would have more threads than
    cores.

    Threads beyond the cores wait for one another: a step on two cores then takes about three times as long. torch's
    threads are unchanged if ``OMP_NUM_THREADS`` is set, as by torchrun, or ``LOCAL_WORLD_SIZE`` is not.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // env.local_world_size(1))
    if env.operator_threads() is None and torch.get_num_threads() > share:
        torch.set_num_threads(share)


# Groups that were made, by default group and arguments: making them is a collective, so it happens once.
_made: tuple[Any, str | None, tuple[dist.ProcessGroup, dist.ProcessGroup]] | None = None


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this host's ranks, and the group of the ranks with this local rank on all hosts.

    The first call for a process group is a collective: all its ranks must make it. Later calls return the same groups.

    Args:
        device: device of the tensors; the meta device needs no groups.
        backend: backend of the groups; default: the default group's.

    Returns:
        both groups; None and None for the meta device.

    Raises:
        UnavailableError: there is no process group.
    """
    global _made
    if device is not None and device.type == "meta":
        return None, None
    if not dist.is_initialized():
        raise UnavailableError("no process group; call torch.distributed.init_process_group on all ranks first")
    default = dist.distributed_c10d._get_default_group()
    if _made is not None and _made[0]() is default and _made[1] == backend:
        return _made[2]
    world_size, rank = dist.get_world_size(), dist.get_rank()
    local_size = get_local_size(world_size)
    hosts = [list(range(first, first + local_size)) for first in range(0, world_size, local_size)]
    # every rank makes all groups in the same order, and keeps its own.
    intra, _ = dist.new_subgroups_by_enumeration(hosts, backend=backend)
    cross, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*hosts)], backend=backend)
    assert intra is not None and cross is not None and dist.get_rank(intra) == rank % local_size
    _made = (weakref.ref(default), backend, (intra, cross))
    return intra, cross
