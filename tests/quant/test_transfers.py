"""Copies between the host and a GPU: in which order they are asked for. The GPU is played where there is none."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recinfer.errors import UnavailableError
from recinfer.inference import results
from recinfer.quant import buffers
from recinfer.quant.transfers import to_device, to_host
from recinfer.sparse.jagged_tensor import JaggedTensor

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_on_the_cpu_nothing_is_copied() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2)]
    assert all(to_device(tensor, CPU) is tensor for tensor in tensors)
    assert [found is given for found, given in zip(to_host(tensors), tensors)] == [True, True]
    assert to_host([]) == []


class Far:
    """A tensor on a GPU, with its values on the CPU."""

    device = GPU
    dtype = torch.float32

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape = values, values.shape


class Near:
    """A tensor of the host."""

    device = CPU

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def pin_memory(self) -> Near:
        self.done.append("pin_memory")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> str:
        self.done.append(f"to {device} non_blocking={non_blocking}")
        return "there"


def test_the_host_waits_for_no_copy_to_a_gpu() -> None:
    done: list[str] = []
    tensor: Any = Near(done)
    assert to_device(tensor, GPU) == "there"
    assert done == ["pin_memory", "to cuda:0 non_blocking=True"]


def test_the_host_waits_once_for_all_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    empty = torch.empty

    class Copy:
        def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
            self.tensor = empty(shape, dtype=dtype)

        def copy_(self, source: Far, non_blocking: bool) -> torch.Tensor:
            done.append(f"copy {list(source.shape)} non_blocking={non_blocking}")
            return self.tensor.copy_(source.values)

    class Event:
        def record(self, stream: str) -> None:
            done.append(f"record {stream}")

        def synchronize(self) -> None:
            done.append("synchronize")

    def pinned(shape: torch.Size, dtype: torch.dtype, pin_memory: bool) -> Copy:
        assert pin_memory
        return Copy(shape, dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    near = torch.zeros(1)
    given: Any = [Far(torch.ones(2, 3)), near, Far(torch.arange(4.0))]
    found = to_host(given)
    assert found[0].tolist() == [[1.0] * 3] * 2 and found[1] is near and found[2].tolist() == [0, 1, 2, 3]
    copies = ["copy [2, 3] non_blocking=True", "copy [4] non_blocking=True"]
    assert done == [*copies, "record stream of cuda:0", "synchronize"]


def test_results_of_all_modules_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on meta stand for those on a GPU."""
    calls = []

    def brought(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(tensors))
        return [torch.full(tensor.shape, float(place)) for place, tensor in enumerate(tensors)]

    monkeypatch.setattr(results, "to_host", brought)
    pooled, values, lengths = (torch.empty(size, device="meta") for size in ((2, 3), (5, 4), (2,)))
    sequence = JaggedTensor.from_parts_unchecked(values, None, lengths)
    found = results.on_host([pooled, None, [sequence, sequence]])
    assert calls == [5] and found[1] is None and found[0].tolist() == [[0.0] * 3] * 2
    assert [(each.values()[0, 0].item(), each.lengths()[0].item()) for each in found[2]] == [(1, 2), (3, 4)]
    here = [torch.ones(2, 3), None]
    assert results.on_host(here) == here and calls == [5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_there_and_back_on_a_gpu() -> None:
    given = [torch.rand(33, 7), torch.arange(5), torch.empty(0, 3), torch.rand(4, 6).t()]
    there = [to_device(tensor, GPU) for tensor in given]
    assert all(tensor.is_cuda for tensor in there)
    back = to_host([*there, given[0]])
    assert all(torch.equal(mine, its) for mine, its in zip(back, [*given, given[0]]))
    assert back[0].is_pinned() and back[-1] is given[0]


class Cuda:
    """CUDA's calls that lock pages, noted."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.locked[pointer] = size
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0


def test_rows_that_stay_in_host_memory_take_just_their_size_and_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fbgemm-gpu-cpu beside a CUDA build of torch too, which has no operator for it."""
    cuda = Cuda()
    monkeypatch.setattr("recinfer.fbgemm.INSTALLED", True)
    monkeypatch.setattr("recinfer.fbgemm.HAS_CUDA", False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    rows = buffers._managed(1000, GPU)
    assert cuda.locked == {rows.data_ptr(): 1000 + buffers.SLACK_BYTES} and not rows.any()
    some = rows[10:20].fill_(3)
    del rows
    gc.collect()
    assert cuda.locked and some.sum() == 30, "a view keeps it locked"
    del some
    gc.collect()
    assert not cuda.locked
    near: Any = SimpleNamespace(is_cuda=True)
    again = copy.deepcopy(buffers.Buffers(near, torch.arange(5, dtype=torch.uint8), 16))
    assert again.managed is not None and again.managed.tolist() == [0, 1, 2, 3, 4] and again.row_alignment == 16
    assert cuda.locked == {again.managed.data_ptr(): 5}, "a copy is page-locked too"
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cuda(code=2))
    with pytest.raises(UnavailableError, match=r"refuses to page-lock 1064 bytes .*\(error 2\).*quant_uvm"):
        buffers._managed(1000, GPU)
