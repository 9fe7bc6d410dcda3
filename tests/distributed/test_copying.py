"""Copies on another device: which tensors are shared and which moved; copies by other threads are unaffected."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from recinfer.distributed import sharded_model_copy
from recinfer.distributed.sharded.copying import copied_to

CPU = torch.device("cpu")
META = torch.device("meta")


class Tied(nn.Module):
    """Two names of one parameter, two views of one storage, a buffer, and a function that nobody could pickle."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(6.0)
        self.first, self.second = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[2:], requires_grad=False)
        self.same = self.first
        self.first.note = [self.second]  # type: ignore[attr-defined]
        self.register_buffer("mask", torch.ones(2))
        self.leaf = torch.zeros(3, requires_grad=True)
        self.sparse = torch.eye(2).to_sparse()
        self.function = lambda: self


def test_shared_tensors_stay_shared_and_are_apart_from_the_originals() -> None:
    module = Tied()
    copied = copied_to(module, CPU)
    assert type(copied) is Tied and copied.same is copied.first and copied.function is module.function
    assert isinstance(copied.second, nn.Parameter) and not copied.second.requires_grad and copied.leaf.requires_grad
    assert copied.first.note[0] is copied.second  # type: ignore[attr-defined]
    assert torch.equal(copied.sparse.to_dense(), torch.eye(2))
    with torch.no_grad():
        copied.second.fill_(7.0)
    assert copied.first.tolist() == [[0.0, 1.0], [7.0, 7.0]] and module.first.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert dict(copied.named_buffers()).keys() == {"mask"} and copied.mask.data_ptr() != module.mask.data_ptr()


def test_all_tensors_go_to_the_device_and_none_is_copied_for_none() -> None:
    moved = copied_to(Tied(), META)
    assert all(t.is_meta for t in (moved.first, moved.second, moved.mask, moved.leaf))
    module = Tied()
    shared = copied_to({"module": module, "tensors": [module.mask]}, None)
    assert shared["module"] is not module and shared["module"].first is module.first
    assert shared["tensors"][0] is module.mask


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_process_groups_and_meshes_are_shared_wherever_they_are(group: dist.ProcessGroup) -> None:
    module = nn.Linear(2, 2)
    mesh = DeviceMesh.from_group(group, "cpu")
    module.places = {"groups": (group, [group]), "mesh": mesh}  # type: ignore[assignment]
    copied: Any = copied_to(module, CPU)
    assert copied.places is not module.places and copied.places["groups"][1][0] is group
    assert copied.places["mesh"] is mesh
    with pytest.raises(TypeError, match="ProcessGroup"):
        copy.deepcopy(module)


def test_other_threads_copy_as_ever_and_torch_is_left_as_it_was() -> None:
    module = Tied()
    before = torch.Tensor.__deepcopy__, nn.Parameter.__deepcopy__
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> Tied:
        assert inside.wait(60)
        try:
            return copy.deepcopy(module)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(elsewhere)
        with sharded_model_copy("meta"):
            inside.set()
            assert done.wait(60)
            mine = copy.deepcopy(module)
            with sharded_model_copy(None):
                shared = copy.deepcopy(module)
            again = copy.deepcopy([module])[0]
            assert (torch.Tensor.__deepcopy__, nn.Parameter.__deepcopy__) == before
        theirs = other.result(60)
    assert mine.first.is_meta and again.first.is_meta and shared.first is module.first
    assert not theirs.first.is_meta and torch.equal(theirs.first, module.first)
    assert theirs.same is theirs.first and theirs.first is not module.first
    assert "__deepcopy__" not in vars(nn.Module) and not copy.deepcopy(module).first.is_meta
