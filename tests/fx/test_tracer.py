"""A traced model gives the numbers of the model; modules without tables can be scripted; the others say why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.types import NoWait, ShardedModule
from recinfer.errors import ConfigError, UnavailableError
from recinfer.fx import Tracer, symbolic_trace
from recinfer.inference.modules import quantize_embeddings, quantize_inference_model, shard_quant_model
from recinfer.models import dlrm
from recinfer.modules.activation import SwishLayerNorm
from recinfer.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModule
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.modules.mlp import MLP, Perceptron
from recinfer.modules.regroup import KTRegroupAsDict
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import EBC, make_batch, sharded

KJT = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 2, 0]))
DENSE = torch.randn(2, 3)


def pooled() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10, 4, "t1", feature_names=["a"]),
            EmbeddingBagConfig(10, 4, "t2", feature_names=["b"], pooling=PoolingType.MEAN),
        ]
    )


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["a", "b"])])


def models() -> dict[str, nn.Module]:
    tables = pooled()
    return {
        "dlrm": dlrm.DLRM(tables, 3, [5, 4], [4, 1]),
        "dcn": dlrm.DLRM_DCN(tables, 3, [5, 4], [4, 1], 2, 3),
        "projection": dlrm.DLRM_Projection(tables, 3, [5, 4], [4, 1], [8], [8]),
    }


def calls(traced: fx.GraphModule) -> list[str]:
    return [node.target for node in traced.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", ["dlrm", "dcn", "projection"])
@pytest.mark.parametrize("stage", ["float", "quantized", "sharded"])
def test_a_traced_model_gives_its_numbers(name: str, stage: str) -> None:
    model = models()[name]
    if stage != "float":
        model = quantize_inference_model(model)
    if stage == "sharded":
        model, _ = shard_quant_model(model, world_size=2, compute_device="cpu")
    traced = symbolic_trace(model)
    assert torch.equal(traced(DENSE, KJT), model(DENSE, KJT))
    assert "sparse_arch.embedding_bag_collection" in calls(traced)
    assert set(model.state_dict()) <= set(traced.state_dict())  # torch.fx keeps constant tensors as buffers
    again = copy.deepcopy(traced)
    assert torch.equal(again(DENSE, KJT), model(DENSE, KJT))


@pytest.mark.parametrize("make", [pooled, sequences])
def test_a_collection_alone_becomes_the_child_of_its_graph(make: Any) -> None:
    module = make()
    quantized = type(quantize_inference_model(nn.Sequential(module))[0]).from_float(module)
    for collection in (module, quantized):
        found, expected = symbolic_trace(collection)(KJT), collection(KJT)
        for key in ("a", "b"):
            one, two = found[key], expected[key]
            assert torch.equal(*(x.values() if isinstance(x, JaggedTensor) else x for x in (one, two)))
    with pytest.raises(ConfigError, match=r"use recinfer\.fx\.symbolic_trace"):
        Tracer().trace(module)


class ReadsFeatures(nn.Module):
    """What user code does with features and pooled vectors, between the collections."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = pooled()
        self.regroup = KTRegroupAsDict([["b"], ["a"]], ["x", "y"])
        weights = {"a": PositionWeightedModule(5), "b": PositionWeightedModule(5)}
        weighted = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "w", feature_names=["a", "b"])], is_weighted=True)
        self.processed = FeatureProcessedEmbeddingBagCollection(weighted, weights)

    def forward(self, features: KeyedJaggedTensor, scale: Tensor | None) -> dict[str, Tensor]:
        one = features["a"]
        copied = KeyedJaggedTensor.from_lengths_sync(["a", "b"], features.values(), features.lengths())
        both = KeyedJaggedTensor.concat([features.permute([1]), copied.permute([0])])
        single = KeyedJaggedTensor.from_jt_dict({"q": JaggedTensor(one.values() * 2, lengths=one.lengths())})
        vectors = self.tables(both)
        extra = KeyedTensor(["e"], [1], one.to_padded_dense(1).float())
        groups = KeyedTensor.regroup([vectors, extra], [["a", "e"], ["b"]])
        named = KeyedTensor.regroup_as_dict([vectors, extra], [["e", "b"]], ["eb"])
        return {
            "q": single.to_dict()["q"].values(),
            "split": features.split([1, 1])[1].values(),
            "group": groups[0] + groups[1].sum(),
            "named": named["eb"],
            "x": self.regroup([vectors, extra])["x"],
            "a": vectors["a"],
            "processed": self.processed(features).values(),
        }


def test_modules_that_take_features_apart_and_put_them_together() -> None:
    module = ReadsFeatures()
    found, expected = symbolic_trace(module)(KJT, None), module(KJT, None)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class StockTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, EmbeddingBagCollection) or super().is_leaf_module(m, module_qualified_name)


def test_a_tracer_of_torch_with_the_collection_as_a_leaf() -> None:
    model = models()["dlrm"]
    traced = fx.GraphModule(model, StockTracer().trace(model))
    assert torch.equal(traced(DENSE, KJT), model(DENSE, KJT))


class Tower(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class HasTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)


def test_leaf_modules_are_named_by_class() -> None:
    with pytest.raises(fx.proxy.TraceError):
        symbolic_trace(HasTower())
    traced = symbolic_trace(HasTower(), leaf_modules=["Tower"])
    assert calls(traced) == ["tower"]


def test_functions_awaitables_and_concrete_arguments() -> None:
    def waits(x: Tensor, factor: int) -> NoWait[Tensor]:
        return NoWait(x * factor)

    traced = symbolic_trace(waits, {"factor": 3})
    assert torch.equal(traced(torch.ones(2), 3).wait(), torch.full((2,), 3.0))


def trace_sharded(rank: int, world_size: int) -> tuple[bool, bool]:
    dmp = sharded(rank, world_size).eval()
    batch = make_batch(rank, 0, 4)
    traced = symbolic_trace(dmp)
    assert isinstance(dmp, DistributedModelParallel) and isinstance(traced.get_submodule(EBC), ShardedModule)
    return torch.equal(traced(batch)[1][1], dmp(batch)[1][1]), EBC in calls(traced)


def test_a_model_in_distributed_model_parallel() -> None:
    assert run_ranks(2, trace_sharded) == [(True, True)] * 2


X = torch.randn(3, 8)
WITHOUT_TABLES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "mlp": (lambda: MLP(8, [4, 2], activation="swish_layernorm"), (X,)),
    "perceptron": (lambda: Perceptron(8, 4), (X,)),
    "swish": (lambda: SwishLayerNorm(8), (X,)),
    "cross": (lambda: CrossNet(8, 2), (X,)),
    "low_rank": (lambda: LowRankCrossNet(8, 2, 3), (X,)),
    "vector": (lambda: VectorCrossNet(8, 2), (X,)),
    "one_expert": (lambda: LowRankMixtureCrossNet(8, 2), (X,)),
    "experts": (lambda: LowRankMixtureCrossNet(8, 2, 3, 2), (X,)),
    "dense": (lambda: dlrm.DenseArch(8, [4, 2]), (X,)),
    "over": (lambda: dlrm.OverArch(8, [4, 2]), (X,)),
    "interaction": (lambda: dlrm.InteractionArch(2), (torch.randn(3, 4), torch.randn(3, 2, 4))),
    "dcn": (lambda: dlrm.InteractionDCNArch(1, CrossNet(8, 2)), (torch.randn(3, 4), torch.randn(3, 1, 4))),
}


@pytest.mark.parametrize("name", sorted(WITHOUT_TABLES))
def test_modules_without_tables_are_scripted_before_and_after_tracing(name: str) -> None:
    make, inputs = WITHOUT_TABLES[name]
    module = make()
    expected = module(*inputs)
    ways = {
        "scripted": module,
        "traced": fx.symbolic_trace(module),
        "traced by recinfer": symbolic_trace(module),
        "a child": symbolic_trace(nn.Sequential(module)) if len(inputs) == 1 else module,
    }
    for way, made in ways.items():
        torch.testing.assert_close(torch.jit.script(made)(*inputs), expected, msg=lambda m, way=way: f"{way}: {m}")


class TextAnnotations(nn.Module):
    """Annotations of this file are text, as in most users' files."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_text_annotations_of_the_user_do_not_keep_a_graph_from_torchscript() -> None:
    scripted = torch.jit.script(symbolic_trace(TextAnnotations()))
    assert torch.equal(scripted(X, X), X + X)


@pytest.mark.parametrize("way", ["model", "traced", "quantized", "sharded", "processed", "regroup"])
def test_scripting_modules_that_read_features_says_what_to_do_instead(way: str) -> None:
    model = models()["dlrm"]
    made: Any = model
    if way == "traced":
        made = symbolic_trace(quantize_embeddings(model, torch.qint8, inplace=False))
    elif way == "quantized":
        made = quantize_inference_model(model)
    elif way == "sharded":
        made, _ = shard_quant_model(quantize_inference_model(model), world_size=2, compute_device="cpu")
    elif way == "processed":
        made = ReadsFeatures().processed
    elif way == "regroup":
        made = KTRegroupAsDict([["a"]], ["x"])
    with pytest.raises(UnavailableError, match=r"recinfer export.*torch\.export"):
        torch.jit.script(made)
