"""Training pipelines at the ends of their iterators: fewer batches than stages, none, and loaders that raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from recinfer.datasets import utils as datasets_utils
from recinfer.streamable import Pipelineable, move_to
from recinfer.training.batches import Batch
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import optimizer_of, sharded
from tests.distributed.test_train_pipeline import CPU, PIPELINES, batches_of, drain

SIZES = (0, 1, 2, 0, 3, 1)  # batches of the iterators that follow one another; the pipelines hold up to three
STEPS = 7


def plain(rank: int, world_size: int) -> list[float]:
    dmp = sharded(rank, world_size)
    optimizer = optimizer_of(dmp)
    losses = []
    for batch in batches_of(rank, world_size, STEPS):
        optimizer.zero_grad()
        loss, _ = dmp(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def short_iterators(rank: int, world_size: int, kind: str) -> list[list[float]]:
    dmp = sharded(rank, world_size)
    pipeline = PIPELINES[kind](dmp, optimizer_of(dmp), CPU)
    batches = iter(batches_of(rank, world_size, STEPS))
    return [drain(pipeline, [next(batches) for _ in range(size)]) for size in SIZES]


def breaking(batches: list[Any], at: int) -> Iterator[Any]:
    yield from batches[:at]
    raise OSError("a file went away")


def broken_loader(rank: int, world_size: int, kind: str, at: int) -> tuple[list[float], list[str]]:
    """The loader of every rank raises after ``at`` batches; the run goes on with what is left."""
    dmp = sharded(rank, world_size)
    pipeline = PIPELINES[kind](dmp, optimizer_of(dmp), CPU)
    batches = batches_of(rank, world_size, STEPS)
    losses, seen = [], []
    stream = breaking(batches, at)
    while True:
        try:
            losses.append(float(pipeline.progress(stream)[0]))
        except OSError as error:
            seen.append(str(error))
            break
    return losses + drain(pipeline, batches[at:]), seen


@pytest.mark.parametrize("kind", list(PIPELINES))
def test_fewer_batches_than_stages_are_all_trained(kind: str) -> None:
    expected = run_ranks(2, plain)
    for rank, found in enumerate(run_ranks(2, short_iterators, kind)):
        assert [len(part) for part in found] == list(SIZES)
        assert [loss for part in found for loss in part] == pytest.approx(expected[rank], rel=1e-6)


@pytest.mark.parametrize("at", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", list(PIPELINES))
def test_an_error_of_the_loader_comes_out_and_no_batch_is_lost(kind: str, at: int) -> None:
    expected = run_ranks(2, plain)
    for rank, (losses, seen) in enumerate(run_ranks(2, broken_loader, kind, at)):
        assert seen == ["a file went away"]
        assert losses == pytest.approx(expected[rank], rel=1e-6)


class Moving:
    """A batch that notes where it has been; no GPU is needed for that."""

    def __init__(self, way: tuple[str, ...] = (), on_gpu: bool = False) -> None:
        self.way, self.on_gpu = way, on_gpu

    def to(self, device: torch.device, non_blocking: bool) -> Moving:
        return Moving((*self.way, f"{device} {non_blocking}"))

    def pin_memory(self) -> Moving:
        if self.on_gpu:
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor'")
        return Moving((*self.way, "pinned"))


def test_batches_go_to_a_gpu_through_pinned_memory() -> None:
    gpu = torch.device("cuda")
    assert move_to(Moving(), gpu).way == ("pinned", "cuda True")
    assert move_to(Moving(), gpu, non_blocking=False).way == ("cuda False",)
    assert move_to(Moving(on_gpu=True), gpu).way == ("cuda True",)
    assert move_to(Moving(), CPU).way == ()
    batch = batches_of(0, 2, 1)[0]
    assert isinstance(batch, Batch) and Batch.pin_memory is not Pipelineable.pin_memory


class Copies(TorchFunctionMode):
    """Notes what becomes of each tensor instead of doing it, since there is no GPU: pinned, then copied without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.copied: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            self.pinned.append(args[0])
            return args[0]
        if name == "to":
            assert str(kwargs.get("device", *args[1:2])) == "cuda" and kwargs["non_blocking"] is True
            self.copied.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Batch, datasets_utils.Batch], ids=["training", "datasets"])
def test_every_tensor_of_a_batch_is_pinned_and_copied_without_waiting_labels_too(kind: Any) -> None:
    made = batches_of(0, 2, 1)[0]
    batch = kind(made.dense_features, made.sparse_features, made.labels)
    with Copies() as seen:
        move_to(batch, torch.device("cuda"))
    inside = {id(t) for t in (batch.dense_features, batch.labels, batch.sparse_features.values(), batch.sparse_features.lengths())}  # fmt: skip
    assert inside <= {id(t) for t in seen.pinned}
    assert {id(t) for t in seen.copied} == {id(t) for t in seen.pinned}
