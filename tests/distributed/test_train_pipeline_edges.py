"""Training pipelines at the ends of their iterators: fewer batches than stages, none, and loaders that raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recinfer.distributed.train_pipeline.tracing import move_to
from recinfer.streamable import Pipelineable
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
