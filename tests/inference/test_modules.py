"""quantize_inference_model and shard_quant_model: what TorchRec documents, with the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.errors import ConfigError
from recinfer.inference.modules import quantize_inference_model, shard_quant_model
from recinfer.modules.embedding_configs import DataType, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.quant.cases import bag_configs, float_bags, random_features

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


class Model(nn.Module):
    """Pooled tables, a sequence table, a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"ebc": float_bags([SUM, MEAN, MEAN, SUM])})
        config = EmbeddingConfig(num_embeddings=60, embedding_dim=16, name="seq", feature_names=["s"])
        self.ec = EmbeddingCollection(tables=[config])
        self.over = nn.Linear(80 + 16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.sparse["ebc"](features).values()
        sequence = self.ec(features)["s"]
        summed = torch.segment_reduce(sequence.values(), "sum", lengths=sequence.lengths().long(), initial=0.0)
        return self.over(torch.cat([pooled, summed], dim=1))


def features_for(batch: int = 12) -> KeyedJaggedTensor:
    extra = EmbeddingConfig(num_embeddings=60, embedding_dim=16, name="seq", feature_names=["s"])
    return random_features([*bag_configs(), extra], batch)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.qint8, torch.quint4x2, torch.quint2x4, torch.float16, torch.float32]
)
def test_quantize_keeps_the_model_and_shares_the_dense_part(dtype: torch.dtype) -> None:
    model = Model()
    before = model(features_for())
    quantized = quantize_inference_model(model, quantization_dtype=dtype, per_table_weight_dtype={"c": torch.quint4x2})
    assert torch.equal(model(features_for()), before)
    assert quantized.over is model.over and quantized.sparse is not model.sparse
    types = {c.name: c.data_type for c in quantized.sparse["ebc"].embedding_bag_configs()}
    assert (types["c"] is DataType.INT4 and types["a"] is not DataType.INT4) or dtype is torch.quint4x2
    bound = 1.0 if dtype is torch.quint2x4 else 0.2
    assert (quantized(features_for()) - before).abs().max() < bound


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", None])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shard_returns_the_weights(kind: str | None, world_size: int) -> None:
    quantized = quantize_inference_model(Model(), per_table_weight_dtype={"d": torch.float16, "seq": torch.quint4x2})
    names = ["a", "b", "c", "d", "seq"]
    constraints = {n: ParameterConstraints(sharding_types=[kind], min_partition=4) for n in names} if kind else None
    if kind == "row_wise" and constraints:
        del constraints["b"]  # a table of one row
    sharded, plan = shard_quant_model(quantized, world_size=world_size, compute_device="cpu", constraints=constraints)
    assert isinstance(sharded.sparse["ebc"], ShardedQuantEmbeddingBagCollection)
    assert isinstance(sharded.ec, ShardedQuantEmbeddingCollection)
    assert set(plan.plan) == {"sparse.ebc", "ec"}
    if kind:
        assert {p.sharding_type for t, p in plan.plan["sparse.ebc"].items() if t != "b"} == {kind}
    assert torch.equal(sharded(features_for()), quantized(features_for()))
    again, same = shard_quant_model(quantized, world_size=world_size, compute_device="cpu", sharding_plan=plan)
    assert same is plan and torch.equal(again(features_for()), quantized(features_for()))


def test_on_meta_nothing_is_allocated() -> None:
    model = nn.Sequential(float_bags())
    for table in model[0].embedding_bags.values():
        table.to("meta")
    quantized = quantize_inference_model(model)
    sharded, _ = shard_quant_model(quantized, world_size=2, compute_device="cpu")
    assert quantized[0].device.type == "meta" and sharded[0].fused


def test_behind_feature_processors() -> None:
    tables = float_bags([SUM] * 4, is_weighted=True)
    processors = PositionWeightedModuleCollection({f"f{i}": 6 for i in range(5)})
    for weight in processors.parameters():
        nn.init.uniform_(weight)
    model = nn.Sequential(FeatureProcessedEmbeddingBagCollection(tables, processors))
    quantized = quantize_inference_model(model, fp_weight_dtype=torch.float16)
    inner = quantized[0].embedding_bag_collection()
    assert isinstance(inner, QuantEmbeddingBagCollection)
    assert {c.data_type for c in inner.embedding_bag_configs()} == {DataType.FP16}
    features = random_features(bag_configs(), 8)
    torch.testing.assert_close(quantized(features).values(), model(features).values(), rtol=2e-3, atol=2e-3)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear holds no float EmbeddingBagCollection"):
        quantize_inference_model(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="names zz; the model has: a, b, c, d, seq"):
        quantize_inference_model(Model(), per_table_weight_dtype={"zz": torch.int8})
    with pytest.raises(ConfigError, match="no packed layout for INT32"):
        quantize_inference_model(Model(), quantization_dtype=DataType.INT32)
    quantized = quantize_inference_model(Model())
    _, plan = shard_quant_model(quantized, world_size=2, compute_device="cpu")
    with pytest.raises(ConfigError, match="no sharder supports a EmbeddingBagCollection; quantize the model first"):
        shard_quant_model(Model(), world_size=2, compute_device="cpu", sharding_plan=plan)
    with pytest.raises(ConfigError, match=r"the plan has modules .ec., .sparse.ebc., which the model lacks"):
        shard_quant_model(nn.Linear(1, 1), world_size=2, compute_device="cpu", sharding_plan=plan)
