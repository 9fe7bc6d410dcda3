"""A sharded state gathered into plain tensors, and moved, on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recinfer.errors import InputError
from recinfer.inference.state_dict_transform import (
    state_dict_all_gather_keys,
    state_dict_gather,
    state_dict_to_device,
)
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import full_state, make_model, sharded


def gathered(rank: int, world_size: int) -> dict[str, Any]:
    state = sharded(rank, world_size).state_dict()
    group = dist.group.WORLD
    assert group is not None
    target = {key: torch.full_like(value, -7.0) for key, value in make_model().state_dict().items()}
    state_dict_gather(state, target)
    moved = state_dict_to_device(state, group, torch.device("cpu"))
    sharded_keys = [key for key, value in state.items() if isinstance(value, ShardedTensor)]
    assert sharded_keys and all(isinstance(moved[key], ShardedTensor) for key in sharded_keys)
    again = {key: torch.empty_like(value) for key, value in target.items()}
    state_dict_gather(moved, again)
    own = {f"rank{rank}": torch.zeros(1), "all": torch.zeros(1)}
    return {
        "target": target,
        "again": again,
        "full": full_state(state),
        "keys": state_dict_all_gather_keys(own, group),
    }


def test_gathering_gives_rank_0_the_whole_tables() -> None:
    first, second = run_ranks(2, gathered)
    assert set(first["target"]) == set(first["full"])
    for key, value in first["full"].items():
        assert torch.equal(first["target"][key], value) and torch.equal(first["again"][key], value), key
    assert any((value == -7.0).all() for value in second["target"].values())  # only rank 0 gets the tables
    assert first["keys"] == second["keys"] == ["all", "rank0", "rank1"]


def keys_apart(rank: int, world_size: int) -> int:
    """A rank that has no piece of a table lacks its key, as with TorchRec's table-wise sharding."""
    group = dist.group.WORLD
    assert group is not None
    state = sharded(rank, world_size).state_dict()
    key = next(k for k in state if "t2" in k)
    mine: ShardedTensor = state[key]  # table-wise, on the last rank
    moved = state_dict_to_device({key: mine} if rank == world_size - 1 else {}, group, torch.device("cpu"))
    return len(moved[key].local_shards())  # type: ignore[union-attr]


def test_a_table_that_only_one_rank_holds() -> None:
    assert run_ranks(2, keys_apart) == [0, 1]


def test_what_is_missing_or_no_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="'x' is missing in the state"):
        state_dict_gather({}, {"x": torch.zeros(1)})
    with pytest.raises(InputError, match="'x' is a str; expected a Tensor"):
        state_dict_gather({"x": "no"}, {"x": torch.zeros(1)})  # type: ignore[dict-item]
