"""Every module that is sharded keeps its state, the optimizer's too, through another number of ranks and one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.checkpoint import CheckpointReader, load_checkpoint, save_checkpoint
from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.embeddingbag import EmbeddingBagSharder
from recinfer.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.optimizers import LAMB, Adagrad, in_backward_optimizer_filter
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

ALL = [t.value for t in ShardingType]


class AnyRows(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ALL


class AnyBag(EmbeddingBagSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ALL


class AnyProcessed(FeatureProcessedEmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ALL


class Model(nn.Module):
    """One of each: unpooled rows, a bag of torch's, half-precision tables behind position weights, a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        rows = [EmbeddingConfig(13, 4, "r0", feature_names=["f0"]), EmbeddingConfig(5, 4, "r1", feature_names=["f1"])]
        bags = [
            EmbeddingBagConfig(17, 8, "b0", feature_names=["f0"]),
            EmbeddingBagConfig(9, 8, "b1", feature_names=["f1"], data_type=DataType.FP16),
        ]
        self.rows = EmbeddingCollection(rows)
        self.bag = nn.EmbeddingBag(11, 4, mode="sum", include_last_offset=True)
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(bags, is_weighted=True), PositionWeightedModuleCollection({"f0": 4, "f1": 4})
        )
        self.over = nn.Linear(20, 1)

    def forward(self, kjt: KeyedJaggedTensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found = self.rows(kjt)
        unpooled = sum(found[n].values().sum() for n in ("f0", "f1"))
        out = torch.cat([self.processed(kjt).values(), self.bag(ids, offsets).reshape(-1, 4)], dim=1)
        return self.over(out).sum() + unpooled


LAYOUTS: dict[str, Any] = {
    "first": {"r0": row_wise(), "r1": table_wise(rank=1), "weight": row_wise(), "b0": column_wise(ranks=[0, 1]), "b1": row_wise()},
    "second": {"r0": column_wise(ranks=[2, 0]), "r1": row_wise(), "weight": table_wise(rank=2), "b0": row_wise(), "b1": table_wise(rank=0)},
}  # fmt: skip


def build(world_size: int, layout: str, kind: Any, seed: int) -> tuple[DistributedModelParallel, Any]:
    torch.manual_seed(seed)
    model = Model()
    tables = [*model.rows.parameters(), *model.bag.parameters()]
    tables += list(model.processed._embedding_bag_collection.parameters())
    apply_optimizer_in_backward(kind, tables, {"lr": 0.1})
    sharders: list[ModuleSharder[Any]] = [AnyRows(), AnyBag(), AnyProcessed()]
    plan = {}
    for path, names, sharder in zip(("rows", "bag", "processed"), (("r0", "r1"), ("weight",), ("b0", "b1")), sharders):
        plan[path] = construct_module_sharding_plan(
            model.get_submodule(path), {n: LAYOUTS[layout][n] for n in names}, sharder, world_size, world_size, "cpu"
        )
    dmp = DistributedModelParallel(model, plan=ShardingPlan(plan), sharders=sharders)
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapper = KeyedOptimizerWrapper(dense, lambda ps: torch.optim.Adagrad(ps, lr=0.1))
    return dmp, CombinedOptimizer([dmp.fused_optimizer, wrapper])


def train(dmp: DistributedModelParallel, optimizer: Any, rank: int) -> None:
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        kjt = KeyedJaggedTensor(
            ["f0", "f1"], torch.randint(0, 5, (8,), generator=generator), lengths=torch.tensor([2, 3, 1, 2])
        )
        dmp(kjt, torch.randint(0, 11, (4,), generator=generator), torch.tensor([0, 1, 4])).backward()
        optimizer.step()


def first(rank: int, world_size: int, kind: Any, folder: str) -> None:
    dmp, optimizer = build(world_size, "first", kind, 1)
    train(dmp, optimizer, rank)
    save_checkpoint(f"{folder}/one", dmp.module, optimizer=optimizer)


def second(rank: int, world_size: int, kind: Any, folder: str) -> None:
    dmp, optimizer = build(world_size, "second", kind, 2)
    report = load_checkpoint(f"{folder}/one", dmp.module, optimizer=optimizer)
    assert not report.missing and not report.extra
    save_checkpoint(f"{folder}/two", dmp.module, optimizer=optimizer)
    train(dmp, optimizer, rank)


@pytest.mark.parametrize("kind", [Adagrad, LAMB])
def test_state_stays_through_every_module(tmp_path: Path, kind: Any) -> None:
    run_ranks(2, first, kind, str(tmp_path))
    run_ranks(3, second, kind, str(tmp_path))
    one, two = (CheckpointReader(tmp_path / name, prefix="") for name in ("one", "two"))
    assert one.stored_keys() == two.stored_keys()
    for key in one.stored_keys():
        assert torch.equal(one.read(key), two.read(key)), key
    assert sum("momentum1" in key for key in one.stored_keys()) == 5
    torch.manual_seed(3)
    alone = Model()
    load_checkpoint(tmp_path / "two", alone)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, one.read(f"model.{name}")), name
