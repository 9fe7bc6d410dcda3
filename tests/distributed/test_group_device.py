"""The devices on which the ranks of a group compute, with simulated NCCL and GPUs: no CPU machine has them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import ConfigError, UnavailableError
from recinfer.group_device import check_devices, device_and_backend, group_device
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


def test_a_rank_that_asks_for_a_gpu_gets_its_own_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_and_backend("cpu", 1, 2) == (torch.device("cpu"), "gloo")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert device_and_backend("cuda", 3, 4) == (torch.device("cuda", 3), BARE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two hosts
    assert device_and_backend("cuda", 3, 4)[0] == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # CUDA_VISIBLE_DEVICES shows each process its own
    assert device_and_backend("cuda", 3, 4)[0] == torch.device("cuda", 0)
    check_devices("cpu", 64)
    check_devices("cuda", 1)
    with pytest.raises(ConfigError, match=r"2 ranks, and torch sees 1 GPU on this host.*--world-size 1 or less"):
        check_devices("cuda", 2)


def test_what_a_gpu_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnavailableError, match=r"--device cuda needs a CUDA build of torch; found torch \d+\.\d+"):
        check_devices("cuda", 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="sees none: look at nvidia-smi"):
        device_and_backend("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UnavailableError, match="need NCCL"):
        device_and_backend("cuda", 1, 2)
