"""A sharded model keeps its rows, its lookups and its state together: under a second name, and after a cast."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.checkpoint.restore import load_checkpoint
from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.embedding_types import OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recinfer.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from recinfer.distributed.types import ShardingPlan, ShardingType
from recinfer.errors import CheckpointError, ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

ROWS, DIM = 6, 8
FUSED = {"optimizer": OptimType.SGD, "learning_rate": 1.0}


class BagSharder(EmbeddingBagCollectionSharder):
    """Every sharding type on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t.value for t in ShardingType]


class RowSharder(EmbeddingCollectionSharder):
    """Every sharding type on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t.value for t in ShardingType]


def of_type(kind: str, world_size: int) -> Any:
    return {
        "table_wise": table_wise(rank=world_size - 1),
        "row_wise": row_wise(),
        "column_wise": column_wise(ranks=[r % world_size for r in range(2)]),
        "replicas": data_parallel(compute_kernel="fused"),
        "dense replicas": data_parallel(compute_kernel="dense"),
    }[kind]


class Towers(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.left = self.right = module
        self.list = nn.ModuleList([module])

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        return self.left(ids)


def collection(pooled: bool) -> nn.Module:
    if pooled:
        bags = EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"], init_fn=nn.init.ones_)
        return EmbeddingBagCollection([bags])
    return EmbeddingCollection([EmbeddingConfig(ROWS, DIM, "t", feature_names=["f"], init_fn=nn.init.ones_)])


def sharded(
    model: nn.Module, path: str, kind: str, world_size: int, fused: Mapping[str, Any] = FUSED
) -> DistributedModelParallel:
    module = model.get_submodule(path)
    pooled = isinstance(module, EmbeddingBagCollection)
    sharder: Any = (BagSharder if pooled else RowSharder)(dict(fused))
    per_table = {"t": of_type(kind, world_size)}
    plan = construct_module_sharding_plan(
        module, per_table, sharder, local_size=world_size, world_size=world_size, device_type="cpu"
    )
    return DistributedModelParallel(model, plan=ShardingPlan({path: plan}), sharders=[sharder])


def ids_of(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def vectors(out: Any) -> torch.Tensor:
    found = out["f"]
    return found if isinstance(found, torch.Tensor) else found.values()


def local_rows(value: Any) -> list[torch.Tensor]:
    return [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]


def two_names(rank: int, world_size: int, path: str) -> None:
    model = Towers(collection(pooled=True))
    dmp = sharded(model, path, "table_wise", world_size)
    inner = dmp.module
    assert inner.left is inner.right is inner.list[0]
    assert type(inner.left).__name__ == "ShardedEmbeddingBagCollection"
    vectors(inner.left(ids_of(1))).sum().backward()
    torch.testing.assert_close(vectors(inner.right(ids_of(1, 2))), torch.stack([torch.zeros(DIM), torch.ones(DIM)]))
    state = dmp.state_dict()
    assert sorted(state) == [f"{name}.embedding_bags.t.weight" for name in ("left", "list.0", "right")]
    assert dmp.load_state_dict(state) == ([], [])
    for name in ("left", "list.0", "right"):  # one name is enough, as in TorchRec
        key = f"{name}.embedding_bags.t.weight"
        assert dmp.load_state_dict({key: torch.full((ROWS, DIM), 7.0)}) == ([], [])
        assert bool((vectors(inner.right(ids_of(0, 5))) == 7).all())
        with tempfile.TemporaryDirectory() as folder:
            torch.save({key: torch.full((ROWS, DIM), 5.0)}, f"{folder}/one.pt")
            assert load_checkpoint(f"{folder}/one.pt", dmp).missing == ()
        assert bool((vectors(inner.left(ids_of(0, 5))) == 5).all())
    with pytest.raises(CheckpointError, match="3 keys are missing"):
        dmp.load_state_dict({})
    assert len(list(dmp.named_parameters())) == 1


@pytest.mark.parametrize("path", ["left", "right", "list.0"])
def test_a_collection_with_three_names_is_sharded_under_all(path: str) -> None:
    run_ranks(1, two_names, path)


def after_casts(rank: int, world_size: int, kind: str, pooled: bool) -> None:
    dmp = sharded(nn.Sequential(collection(pooled)), "0", kind, world_size)
    key = f"0.{'embedding_bags' if pooled else 'embeddings'}.t.weight"
    before = [rows.dtype for rows in local_rows(dmp.state_dict()[key])]
    dmp.half().float()
    dmp.to(torch.bfloat16)
    assert [rows.dtype for rows in local_rows(dmp.state_dict()[key])] == before
    dmp.double()
    if kind != "dense replicas":
        vectors(dmp(ids_of(1))).sum().backward()  # row 1 becomes 0, or less where ranks add
        now = vectors(dmp(ids_of(1, 2)))
        assert float(now[0, 0]) < 1 == float(now[1, 0])
        if kind == "replicas":
            torch.testing.assert_close(local_rows(dmp.state_dict()[key])[0][1], now[0].detach())
    dmp.load_state_dict({key: torch.full((ROWS, DIM), 7.0)})
    assert bool((vectors(dmp(ids_of(0, 1, 5))) == 7).all())
    assert all(bool((rows == 7).all()) for rows in local_rows(dmp.state_dict()[key]))
    with pytest.raises(ConfigError, match="cannot be moved to meta"):
        dmp.to("meta")


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "replicas", "dense replicas"])
def test_a_cast_leaves_rows_and_state_together(kind: str, pooled: bool) -> None:
    run_ranks(2, after_casts, kind, pooled)


class Tower(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = self.again = nn.Linear(DIM, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.again(self.over(vectors(self.ebc(ids))) * torch.ones(DIM))


class TwoParents(nn.Module):
    """Each tower looks other ids up in one collection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
        self.a, self.b = Tower(ebc), Tower(ebc)

    def forward(self, batch: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.a(batch.left) + 2 * self.b(batch.right)
        return out.sum(), out.detach()


@dataclass
class Pair:
    left: KeyedJaggedTensor
    right: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Pair:
        return Pair(self.left.to(device), self.right.to(device))

    def record_stream(self, stream: Any) -> None:
        raise AssertionError("there is no stream on CPU")


def trained(pipeline_of: Any, path: str) -> list[torch.Tensor]:
    dmp = sharded(TwoParents(), path, "table_wise", 1)
    dense = [p for name, p in dmp.named_parameters() if "ebc" not in name]
    pipeline = pipeline_of(dmp, torch.optim.SGD(dense, 0.1), torch.device("cpu"))
    batches = iter([Pair(ids_of(1, 2), ids_of(3, 4)), Pair(ids_of(2, 2), ids_of(5, 0)), Pair(ids_of(4), ids_of(5))])
    outs = [pipeline.progress(batches) for _ in range(3)]
    for tower in (dmp.module.a, dmp.module.b):
        assert tower.over is tower.again
    return outs


def pipelines(rank: int, world_size: int, path: str) -> None:
    expected = trained(TrainPipelineBase, path)
    for found in (
        trained(TrainPipelineSparseDist, path),
        trained(partial(TrainPipelineSparseDist, apply_jit=True), path),
    ):
        for out, right in zip(found, expected, strict=True):
            torch.testing.assert_close(out, right)


@pytest.mark.parametrize("path", ["a.ebc", "b.ebc"])
def test_a_pipeline_trains_two_towers_with_one_collection(path: str) -> None:
    run_ranks(1, pipelines, path)


def optimizer_after_casts(rank: int, world_size: int) -> None:
    """A cast model and one that was never cast train alike, optimizer state too, which loads into a third."""
    plain, cast, loaded = (
        sharded(nn.Sequential(collection(True)), "0", "column_wise", world_size, {"optimizer": OptimType.ADAM})
        for _ in range(3)
    )
    for dmp in (plain, cast):
        vectors(dmp(ids_of(1, 2))).square().sum().backward()
    cast.half().float().to(torch.bfloat16)
    loaded.double()
    for dmp in (plain, cast):
        vectors(dmp(ids_of(1, 3))).square().sum().backward()
    loaded.load_state_dict(cast.state_dict())
    loaded.fused_optimizer.load_state_dict(cast.fused_optimizer.state_dict())
    for dmp in (plain, loaded):
        vectors(dmp(ids_of(1, 3))).square().sum().backward()
    torch.testing.assert_close(vectors(loaded(ids_of(0, 1, 2, 3))), vectors(plain(ids_of(0, 1, 2, 3))), rtol=0, atol=0)


def test_optimizer_state_follows_the_rows_after_a_cast() -> None:
    run_ranks(2, optimizer_after_casts)
