"""``ShardingEnv(output_dtensor=True)``: states are DTensors, and whatever takes a state takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from recinfer.checkpoint import CheckpointReader, load_checkpoint, save_checkpoint, save_checkpoint_async
from recinfer.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from recinfer.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.local_tensors import local_pieces
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import (
    EBC,
    AnySharder,
    make_batch,
    make_model,
    make_plan,
    optimizer_of,
)


def build(
    rank: int, world_size: int, output_dtensor: bool, device: str = "cpu"
) -> tuple[DistributedModelParallel, Any]:
    model = make_model(device)
    apply_optimizer_in_backward(RowWiseAdagrad, model.get_submodule(EBC).parameters(), {"lr": 0.05, "eps": 1e-8})
    env = ShardingEnv(world_size, rank, dist.group.WORLD, output_dtensor)
    dmp = DistributedModelParallel(model, env=env, plan=make_plan(model, world_size), sharders=[AnySharder()])
    return dmp, optimizer_of(dmp)


def step(dmp: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    dmp(make_batch(number, rank * 12, (rank + 1) * 12))[0].backward()
    optimizer.step()


def pieces(state: dict[str, Any]) -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    return {k: [(at, t.clone()) for t, at in local_pieces(v)] for k, v in state.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    for key in one:
        assert [at for at, _ in one[key]] == [at for at, _ in other[key]], key
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one[key], other[key])), key
    return True


def states_of(rank: int, world_size: int, folder: str) -> bool:
    plain, plain_optimizer = build(rank, world_size, False)
    dmp, optimizer = build(rank, world_size, True)
    for number in range(2):
        step(plain, plain_optimizer, rank, number)
        step(dmp, optimizer, rank, number)

    state = dmp.state_dict()
    tables = {k.rsplit(".", 2)[1]: v for k, v in state.items() if "embedding_bags" in k}
    placements = {name: v.placements for name, v in tables.items() if isinstance(v, DTensor)}
    assert placements == {"t0": (Shard(0),), "t1": (Shard(1),), "t2": (Replicate(),)}  # t3 is a replica: no DTensor
    assert {name: tuple(v.shape) for name, v in tables.items()} == {
        "t0": (40, 8), "t1": (30, 8), "t2": (11, 8), "t3": (7, 8),
    }  # fmt: skip
    assert same(pieces(state), pieces(plain.state_dict()))
    own, others = (o.fused_optimizer.state_dict()["state"] for o in (dmp, plain))
    assert own.keys() == others.keys()
    for key, values in own.items():
        assert isinstance(values[f"{key.split('.')[-2]}.momentum1"], DTensor if ".t3." not in key else torch.Tensor)
        assert same(pieces(values), pieces(others[key]))

    # What was saved as DTensors loads into a model of ShardedTensors and the other way round; whole, and in place.
    save_checkpoint(f"{folder}/one", dmp.module.model, optimizer=optimizer)
    save_checkpoint_async(f"{folder}/two", dmp.module.model, optimizer=optimizer).result(60)
    save_checkpoint(f"{folder}/three", plain.module.model, optimizer=plain_optimizer)
    dist.barrier()
    for name, into in [("one", False), ("two", True), ("three", True)]:
        again, its = build(rank, world_size, into, device="meta")
        report = load_checkpoint(f"{folder}/{name}", again.module.model, optimizer=its)
        assert not report.missing and not report.extra
        assert same(pieces(again.state_dict()), pieces(state))
        step(again, its, rank, 2)
        same_sums = [pieces(v) for v in its.state_dict()["state"].values()]
        assert same_sums
        again.load_state_dict(state)
        assert same(pieces(again.state_dict()), pieces(state))
    its.load_state_dict(optimizer.state_dict())

    copied = dmp.copy(torch.device("cpu"))
    before = pieces(dmp.state_dict())
    assert same(pieces(copied.state_dict()), before)
    copied.init_data_parallel()
    step(copied, optimizer_of(copied), rank, 3)
    assert same(pieces(dmp.state_dict()), before)
    assert not torch.equal(
        pieces(copied.state_dict())[f"{EBC}.embedding_bags.t0.weight"][0][1],
        before[f"{EBC}.embedding_bags.t0.weight"][0][1],
    )
    return True


def test_states_are_dtensors_and_travel(tmp_path: Path) -> None:
    assert run_ranks(2, states_of, str(tmp_path)) == [True, True]
    one, three = (CheckpointReader(tmp_path / name, prefix="") for name in ("one", "three"))
    assert one.stored_keys() == three.stored_keys()
    assert all(torch.equal(one.read(key), three.read(key)) for key in one.stored_keys())


def test_dtensors_need_ranks() -> None:
    with pytest.raises(ConfigError, match="output_dtensor=True without a process group"):
        ShardingEnv(1, 0, None, output_dtensor=True)
    assert ShardingEnv.from_local(2, 0).device_mesh is None


def lookup_in(rank: int, world_size: int) -> list[str]:
    dmp, _ = build(rank, world_size, True)
    sharding = next(iter(dmp.module.get_submodule(EBC).shardings.values()))
    lookup = sharding.create_lookup()
    kinds = {type(v) for v in lookup.state_dict().values()}
    table = ShardedEmbeddingTable(
        4, 4, "t", DataType.FP32, ["f"], pooling=PoolingType.SUM, local_rows=4, local_cols=4,
        compute_kernel=EmbeddingComputeKernel.FUSED,
    )  # fmt: skip
    config = GroupedEmbeddingConfig(
        DataType.FP32, PoolingType.SUM, False, False, EmbeddingComputeKernel.FUSED, [table], {}
    )
    env = ShardingEnv(world_size, rank, dist.group.WORLD, True)
    alone = GroupedPooledEmbeddingsLookup([config], env=env)  # a table that knows no place: the rows themselves
    kinds |= {type(v) for v in alone.state_dict().values()}
    return sorted(kind.__name__ for kind in kinds)


def test_lookups_give_what_their_env_says() -> None:
    for kinds in run_ranks(2, lookup_in):
        assert kinds == ["DTensor", "Tensor"]


def test_plain_tensors_and_sharded_ones_are_pieces_too() -> None:
    ((piece, at),) = local_pieces(nn.Parameter(torch.ones(2, 3)))
    assert at == (0, 0)
    assert not piece.requires_grad
    assert issubclass(ShardedTensor, torch.Tensor)
