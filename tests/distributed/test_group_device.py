"""Where the ranks of a group compute. NCCL and GPUs are played: no CPU machine has them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.types import ShardingEnv
from recinfer.group_device import group_device
from recinfer.optim.clipping import GradientClippingOptimizer
from recinfer.optim.keyed import KeyedOptimizer
from tests.distributed.spawn import run_ranks


def devices(rank: int, world: int, config: str, current: int, gpus: int) -> list[str]:
    """Of the group, of what clips the gradients of ranks without any, and of the mesh."""
    pg = dist.group.WORLD
    assert pg is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda pg: "undefined")  # as a bare init_process_group() leaves it
        patch.setattr(dist, "get_backend_config", lambda pg: config)
        patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        patch.setattr(torch.cuda, "current_device", lambda: current)
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        clipping = GradientClippingOptimizer(KeyedOptimizer({}, {}, []))
        return [str(group_device(pg)), str(clipping._device(pg))]


BARE = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("config", "current", "gpus", "expected"),
    [
        (BARE, 0, 4, ["cuda:0", "cuda:1"]),  # nobody chose: the local rank's
        (BARE, 0, 1, ["cuda:0", "cuda:0"]),  # CUDA_VISIBLE_DEVICES shows each process its own
        (BARE, 3, 4, ["cuda:3", "cuda:3"]),  # torch.cuda.set_device
        (BARE, 0, 0, ["cpu", "cpu"]),
        ("cpu:gloo,cuda:gloo", 3, 4, ["cpu", "cpu"]),
    ],
)
def test_a_rank_computes_on_its_gpu(config: str, current: int, gpus: int, expected: list[str]) -> None:
    assert run_ranks(2, devices, config, current, gpus) == [[device, device] for device in expected]


def second_host(rank: int, world: int) -> list[str]:
    return devices(rank, world, BARE, 0, 4)


def test_the_local_rank_counts_on_its_host() -> None:
    found = run_ranks(4, second_host, env={"LOCAL_WORLD_SIZE": "2"})
    assert [device for device, _ in found] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def defaults(rank: int, world: int) -> list[str]:
    pg = dist.group.WORLD
    assert pg is not None
    mesh = ShardingEnv.from_process_group(pg).device_mesh
    assert mesh is not None
    return [str(DistributedModelParallel(nn.Linear(2, 2)).device), mesh.device_type]


def test_a_bare_group_without_a_gpu_computes_on_the_cpu() -> None:
    assert run_ranks(1, defaults, backend=None) == [["cpu", "cpu"]]
