"""Hosts and groups from the environment that torchrun sets, and doing something on one rank for all."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from recinfer.distributed.collective_utils import invoke_on_rank_and_broadcast_result, is_leader, run_on_leader
from recinfer.distributed.comm import ranks as comm
from recinfer.distributed.comm.ranks import (
    divide_cores,
    get_group_rank,
    get_local_rank,
    get_local_size,
    get_num_groups,
    intra_and_cross_node_pg,
)
from recinfer.errors import ConfigError, InputError, UnavailableError
from tests.distributed.spawn import run_ranks


def places(rank: int, world: int) -> tuple[int, int, int, int]:
    return get_local_size(), get_local_rank(), get_group_rank(), get_num_groups()


def test_places_on_hosts() -> None:
    two_hosts = {"LOCAL_WORLD_SIZE": "2"}
    assert run_ranks(4, places, env=two_hosts) == [(2, 0, 0, 2), (2, 1, 0, 2), (2, 0, 1, 2), (2, 1, 1, 2)]
    assert run_ranks(3, places, env=two_hosts) == [(3, r, 0, 1) for r in range(3)]  # 3 ranks are no two hosts
    assert run_ranks(2, places, env={"LOCAL_WORLD_SIZE": "2"}) == [(2, 0, 0, 1), (2, 1, 0, 1)]


def test_places_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (get_local_size(8), get_num_groups(8), get_local_rank(8, 5), get_group_rank(8, 5)) == (8, 1, 5, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (get_local_size(8), get_num_groups(8), get_local_rank(8, 5), get_group_rank(8, 5)) == (4, 2, 1, 1)
    with pytest.raises(UnavailableError, match="no WORLD_SIZE; start with torchrun, or pass world_size"):
        get_local_size()
    with pytest.raises(UnavailableError, match="no RANK; start with torchrun, or pass rank"):
        get_local_rank(8)
    with pytest.raises(InputError, match="rank 8 with 8 ranks"):
        get_group_rank(8, 8)
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (get_local_size(), get_local_rank(), get_group_rank(), get_num_groups()) == (4, 2, 1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
        get_local_size(8)


def groups(rank: int, world: int) -> tuple[list[int], list[int]]:
    intra, cross = intra_and_cross_node_pg(torch.device("cpu"))
    assert intra is not None and cross is not None
    assert intra_and_cross_node_pg(torch.device("cpu")) == (intra, cross)
    assert intra_and_cross_node_pg(torch.device("meta")) == (None, None)
    again, _ = intra_and_cross_node_pg(backend="gloo")
    assert again is not None and again.size() == intra.size()
    total = torch.tensor([rank])
    dist.all_reduce(total, group=cross)
    ranks = dist.get_process_group_ranks(cross)
    assert total.item() == sum(ranks)
    return dist.get_process_group_ranks(intra), ranks


def test_groups_inside_and_across_hosts() -> None:
    for _ in range(2):  # a second process group gets groups of its own
        assert run_ranks(4, groups, env={"LOCAL_WORLD_SIZE": "2"}) == [
            ([0, 1], [0, 2]),
            ([0, 1], [1, 3]),
            ([2, 3], [0, 2]),
            ([2, 3], [1, 3]),
        ]
    assert run_ranks(2, groups) == [([0, 1], [0]), ([0, 1], [1])]


def test_groups_need_a_process_group() -> None:
    with pytest.raises(UnavailableError, match="no process group"):
        comm.intra_and_cross_node_pg()


def square_with_rank(number: int, *, plus: int = 0) -> tuple[int, int]:
    return number * number + plus, dist.get_rank()


def invoke(rank: int, world: int) -> list[object]:
    pg = dist.group.WORLD
    assert pg is not None
    seen: list[object] = [is_leader(pg), is_leader(pg, 1), is_leader(None)]
    seen.append(invoke_on_rank_and_broadcast_result(pg, 1, square_with_rank, 3, plus=1))
    decorated = run_on_leader(pg, 0)(square_with_rank)
    assert decorated.__name__ == "square_with_rank"
    seen.append(decorated(2))
    # In a group of some ranks, the rank is the group's.
    if world > 2:
        some = dist.new_group([1, 2])
        if rank in (1, 2):
            assert is_leader(some, rank - 1)
            seen.append(invoke_on_rank_and_broadcast_result(some, 1, square_with_rank, 4))
    return seen


def test_one_rank_does_it_for_all() -> None:
    same = [(10, 1), (4, 0)]
    assert run_ranks(2, invoke) == [[True, False, True, *same], [False, True, True, *same]]
    assert run_ranks(3, invoke)[2] == [False, False, True, *same, (16, 2)]


def fail(kind: type[Exception]) -> None:
    raise kind("no luck")


def invoke_failing(rank: int, world: int) -> None:
    pg = dist.group.WORLD
    assert pg is not None
    with pytest.raises(ConfigError, match="no luck"):
        invoke_on_rank_and_broadcast_result(pg, 0, fail, ConfigError)
    expected: tuple[type[Exception], str] = (KeyError, "no luck")
    if rank != 1:
        expected = (UnavailableError, "rank 1 failed in fail: KeyError: 'no luck'")
    with pytest.raises(expected[0], match=expected[1]):
        invoke_on_rank_and_broadcast_result(pg, 1, fail, KeyError)
    with pytest.raises(InputError, match="rank 2 of a group of 2 ranks"):
        invoke_on_rank_and_broadcast_result(pg, 2, fail, KeyError)


def test_a_failure_reaches_all_ranks_at_once() -> None:
    run_ranks(2, invoke_failing)


@pytest.mark.parametrize(("local", "threads", "left"), [("2", None, 1), ("1", None, 2), (None, None, 2), ("2", "2", 2)])
def test_ranks_of_a_host_divide_its_cores(
    local: str | None, threads: str | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOCAL_WORLD_SIZE": local, "OMP_NUM_THREADS": threads}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        divide_cores()
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)
