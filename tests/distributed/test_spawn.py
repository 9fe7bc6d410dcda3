"""The utility that runs tests on real ranks: results by rank, clean groups, tracebacks, deaths and hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import RankError, run_ranks


def add_up(rank: int, world_size: int, number: int) -> torch.Tensor:
    total = torch.tensor([float(rank + number)])
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size and torch.get_num_threads() == 1
    return total


def fail_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"no luck on rank {rank}")
    dist.barrier()


def die_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def sleep_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        time.sleep(60)


def read_environment(rank: int, world_size: int) -> str | None:
    return os.environ.get("LOCAL_WORLD_SIZE")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(world_size: int) -> None:
    total = sum(r + 10 for r in range(world_size))
    assert [r.item() for r in run_ranks(world_size, add_up, 10)] == [total] * world_size


def test_the_failing_rank_is_named_with_its_traceback_and_the_next_run_is_clean() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed(.|\n)*fail_on(.|\n)*no luck on rank 1"):
        run_ranks(3, fail_on, 1)
    assert run_ranks(2, add_up, 0)[0].item() == 1


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*the process died \(exit code"):
        run_ranks(2, die_on, 1)


def test_a_rank_that_hangs_is_killed_in_time() -> None:
    with pytest.raises(RankError, match=r"ranks \[.*1.*\] of 2 did not answer within 1.0 s"):
        run_ranks(2, sleep_on, 1, timeout=1.0)


def test_the_environment_is_that_call_s_only() -> None:
    assert run_ranks(2, read_environment, env={"LOCAL_WORLD_SIZE": "1"}) == ["1", "1"]
    assert run_ranks(2, read_environment) == [os.environ.get("LOCAL_WORLD_SIZE")] * 2
