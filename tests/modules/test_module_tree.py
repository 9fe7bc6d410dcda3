"""A module under two names is one module: everything that replaces, plans or lists modules decides by identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.leaves import find_leaves
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
from recinfer.distributed.planner.inference import plan_inference
from recinfer.errors import ConfigError
from recinfer.inference.export import export_archive
from recinfer.inference.modules import quantize_embeddings, quantize_inference_model, shard_quant_model
from recinfer.inference.predictor import load
from recinfer.module_tree import module_names, named_children, outermost_modules
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor


class Tower(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.ebc(features)["f"].sum(1)


class Towers(nn.Module):
    """One collection under five names: two parents, two names of one parent, and in a list."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["f"])], device=torch.device(device))
        self.a, self.b, self.c, self.d = Tower(ebc), Tower(ebc), ebc, ebc
        self.both = nn.ModuleList([ebc, nn.Identity()])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.a(features) + 2 * self.b(features)

    def collections(self) -> list[Any]:
        return [self.a.ebc, self.b.ebc, self.c, self.d, self.both[0]]


NAMES = ["a.ebc", "b.ebc", "c", "d", "both.0"]
IDS = KeyedJaggedTensor(["f"], torch.tensor([1, 8, 3]), lengths=torch.tensor([2, 1]))


def test_each_module_comes_once_with_all_its_names() -> None:
    model = Towers()
    assert module_names(model)[id(model.c)] == NAMES
    assert [name for name, _ in named_children(model)] == ["a", "b", "c", "d", "both"]
    found = list(outermost_modules(model, lambda m: isinstance(m, EmbeddingBagCollection)))
    assert [(path, m is model.c) for path, m in found] == [("a.ebc", True)]


@pytest.mark.parametrize("inplace", [True, False])
def test_quantize_embeddings_replaces_every_name(inplace: bool) -> None:
    done = quantize_embeddings(Towers(), torch.qint8, inplace)
    assert len({id(m) for m in done.collections()}) == 1
    assert type(done.c).__module__ == "recinfer.quant.embedding_modules"


def test_a_quantized_model_is_sharded_under_every_name() -> None:
    model = Towers()
    quantized = quantize_inference_model(model)
    assert len({id(m) for m in quantized.collections()}) == 1
    sharded, plan = shard_quant_model(quantized, compute_device="cpu")
    assert list(plan.plan) == ["a.ebc"]
    assert len({id(m) for m in sharded.collections()}) == 1
    assert type(sharded.d).__name__ == "ShardedQuantEmbeddingBagCollection"
    torch.testing.assert_close(sharded(IDS), quantized(IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_may_name_any_of_the_names(name: str) -> None:
    quantized = quantize_inference_model(Towers())
    _, plan = shard_quant_model(quantized, compute_device="cpu")
    plan.plan = {name: plan.plan["a.ebc"]}
    sharded, _ = shard_quant_model(quantized, compute_device="cpu", sharding_plan=plan)
    assert len({id(m) for m in sharded.collections()}) == 1
    assert type(sharded.d).__name__ == "ShardedQuantEmbeddingBagCollection"


def test_an_archive_holds_the_table_once(tmp_path: Path) -> None:
    model = Towers()
    torch.save(model.state_dict(), tmp_path / "towers.pt")
    plan = plan_inference(Towers("meta"), world_size=1)
    assert [table.name for table in plan.tables] == ["a.ebc.t"]
    out = tmp_path / "towers.rqa"
    export_archive(
        Towers("meta"), CheckpointReader(tmp_path / "towers.pt"), plan, out, name="m", version="1", progress=False
    )
    answer = load(out).predict(None, IDS)
    expected = 3 * quantize_inference_model(model).a(IDS)
    torch.testing.assert_close(next(iter(answer.values())).reshape(-1), expected, rtol=0, atol=1e-5)


class ManagedCollisionEmbeddingBagCollection(nn.Module):
    """TorchRec's, by its name and its parts."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self._embedding_module = ebc
        self._managed_collision_collection = ManagedCollisionCollection(ebc)


class ManagedCollisionCollection(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self._configs = ebc.embedding_bag_configs()

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs


class ITEPEmbeddingBagCollection(nn.Module):
    """TorchRec's, by its name and its collection."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self._embedding_bag_collection = ebc


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ManagedCollisionEmbeddingBagCollection, ", which none of the given sharders shards; give its own sharder too"),
        (ManagedCollisionCollection, ", which none of the given sharders shards; give its own sharder too"),
        (ITEPEmbeddingBagCollection, "; recinfer has no in-table pruning"),
    ],
)
def test_modules_that_remap_ids_are_refused_without_their_sharder(kind: type[Any], why: str) -> None:
    model = nn.Sequential(kind(Towers("meta").c))
    message = rf"module '0' is a {kind.__name__}{why}"
    if kind is ITEPEmbeddingBagCollection:
        with pytest.raises(ConfigError, match=message):
            plan_inference(model, world_size=1)
        with pytest.raises(ConfigError, match=message):
            find_leaves(model)  # of an export
    with pytest.raises(ConfigError, match=message):
        EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu")).plan(
            model, [EmbeddingBagCollectionSharder()]
        )


def test_the_tables_behind_managed_collisions_are_found_once() -> None:
    model = nn.Sequential(ManagedCollisionEmbeddingBagCollection(Towers("meta").c))
    (leaf,) = find_leaves(model)
    assert leaf.path == "0._embedding_module"
    assert {table.module for table in plan_inference(model, world_size=1).tables} == {leaf.path}
    with pytest.raises(ConfigError, match="no EmbeddingBagCollection"):
        find_leaves(model[0]._managed_collision_collection)
