"""The evaluation pipeline gives the model's outputs and trains nothing; its thread reads one batch ahead and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recinfer.distributed.train_pipeline import DataLoadingThread, EvalPipelineSparseDist
from recinfer.errors import ConfigError
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import full_state, optimizer_of, sharded
from tests.distributed.test_train_pipeline import batches_of, drain

CPU = torch.device("cpu")


def evaluate(rank: int, world_size: int) -> dict[str, Any]:
    dmp = sharded(rank, world_size)  # in training mode, which must not matter
    before = full_state(dmp.state_dict())
    batches = batches_of(rank, world_size)
    expected = [float(dmp(batch)[1][0]) for batch in batches]
    pipeline: EvalPipelineSparseDist[Any, Any] = EvalPipelineSparseDist(dmp, optimizer_of(dmp), CPU)
    losses = drain(pipeline, batches) + drain(pipeline, batches[:2])  # a new iterator after the end of the last
    after = full_state(dmp.state_dict())
    pipeline.progress(iter(batches))
    with pytest.raises(ConfigError, match="another iterator before the end"):
        pipeline.progress(iter(batches))
    pipeline.detach()
    return {"losses": losses, "expected": expected + expected[:2], "same": compare(before, after)}


def compare(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(v is None or torch.equal(v, two[k]) for k, v in one.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_gives_the_outputs_of_the_model_and_trains_nothing(world_size: int) -> None:
    for found in run_ranks(world_size, evaluate):
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["same"]


class Batches:
    """Ten batches; counts what was taken."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.taken, self.fail_at = 0, fail_at

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.taken == self.fail_at:
            raise OSError("the disk is gone")
        if self.taken == 10:
            raise StopIteration
        self.taken += 1
        return self.taken


def thread_of(batches: Batches) -> DataLoadingThread[int]:
    thread: DataLoadingThread[int] = DataLoadingThread(CPU, iter(batches), to_device_non_blocking=True)
    thread.start()
    return thread


def test_the_thread_gives_all_batches_in_order_then_none() -> None:
    thread = thread_of(Batches())
    assert [thread.get_next_batch() for _ in range(12)] == [*range(1, 11), None, None]
    with pytest.raises(StopIteration):
        thread.get_next_batch(none_throws=True)
    thread.join(timeout=60)
    assert not thread.is_alive() and thread.daemon


def test_the_thread_reads_one_batch_ahead_and_ends_when_stopped() -> None:
    batches = Batches()
    thread = thread_of(batches)
    assert thread.get_next_batch() == 1
    assert batches.taken <= 2
    thread.stop()
    thread.join(timeout=60)
    assert not thread.is_alive() and batches.taken <= 2
    assert thread.get_next_batch() is None


def test_what_the_iterator_raises_is_raised_where_batches_are_asked_for() -> None:
    thread = thread_of(Batches(fail_at=1))
    assert thread.get_next_batch() == 1
    with pytest.raises(OSError, match="the disk is gone"):
        thread.get_next_batch()
    assert thread.get_next_batch() is None
