"""The documented small classes around a sharded module do what their names say, on real tables and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.comm_ops import set_gradient_division
from recinfer.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from recinfer.distributed.embedding_lookup import (
    CommOpGradientScaling,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    embeddings_cat_empty_rank_handle,
    fx_wrap_tensor_view2d,
)
from recinfer.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseEmbeddingSharder,
    BaseGroupedFeatureProcessor,
    BaseQuantEmbeddingSharder,
    EmbeddingAttributes,
    EmbeddingComputeKernel,
    EmbeddingLocation,
    FeatureShardingMixIn,
    GroupedEmbeddingConfig,
    ModuleShardingMixIn,
    ShardedConfig,
    ShardedEmbeddingModule,
    ShardedEmbeddingTable,
    ShardedMetaConfig,
    compute_kernel_to_embedding_location,
)
from recinfer.distributed.embeddingbag import (
    EmbeddingAwaitable,
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
    ShardedEmbeddingBag,
)
from recinfer.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.types import DataType, LazyAwaitable, ShardingEnv, ShardingType
from recinfer.modules.embedding_configs import EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

ROWS, DIM = 11, 4


def table(name: str, feature: str, pooling: PoolingType = PoolingType.SUM) -> ShardedEmbeddingTable:
    return ShardedEmbeddingTable(
        num_embeddings=ROWS,
        embedding_dim=DIM,
        name=name,
        feature_names=[feature],
        embedding_names=[feature],
        pooling=pooling,
        local_rows=ROWS,
        local_cols=DIM,
        compute_kernel=EmbeddingComputeKernel.DENSE,
    )


def group(*tables: ShardedEmbeddingTable, pooling: PoolingType = PoolingType.SUM) -> GroupedEmbeddingConfig:
    return GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=pooling,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.DENSE,
        embedding_tables=list(tables),
    )


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([1, 2, 3, 10, 0]), lengths=torch.tensor([2, 1, 0, 2]))


def weights_of(lookup: nn.Module) -> dict[str, torch.Tensor]:
    return {name.split(".")[-2]: value.detach() for name, value in lookup.state_dict().items()}


def test_features_and_columns_of_a_group() -> None:
    made = group(table("t", "f"), table("u", "g"))
    assert made.feature_names() == made.embedding_names() == ["f", "g"]
    assert made.feature_hash_sizes() == [ROWS, ROWS]
    assert (made.num_features(), made.dim_sum(), made.table_names()) == (2, 2 * DIM, ["t", "u"])
    assert made.embedding_dims() == [DIM, DIM] and made.embedding_shard_metadata() == [None, None]
    shard = made.embedding_tables[0]
    assert isinstance(shard, ShardedMetaConfig) and isinstance(shard, ShardedConfig)
    assert isinstance(shard, EmbeddingAttributes) and (shard.local_rows, shard.local_cols) == (ROWS, DIM)


def test_grouped_lookups_are_embedding_bags_and_embeddings() -> None:
    pooled = GroupedPooledEmbeddingsLookup([group(table("t", "f"), table("u", "g"))])
    sequence = GroupedEmbeddingsLookup([group(table("t", "f"), table("u", "g"), pooling=PoolingType.NONE)])
    assert isinstance(pooled, BaseEmbeddingLookup) and isinstance(sequence, BaseEmbeddingLookup)
    kjt = features()
    rows = weights_of(pooled)
    expected = torch.cat(
        [
            torch.stack([rows["t"][[1, 2]].sum(0), rows["t"][[3]].sum(0)]),
            torch.stack([torch.zeros(DIM), rows["u"][[10, 0]].sum(0)]),
        ],
        dim=1,
    )
    torch.testing.assert_close(pooled(kjt), expected)
    rows = weights_of(sequence)
    torch.testing.assert_close(sequence(kjt), torch.cat([rows["t"][[1, 2, 3]], rows["u"][[10, 0]]]))


class Doubled(BaseGroupedFeatureProcessor):
    """Weighs every id by two."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weights = torch.full((features.values().numel(),), 2.0)
        return KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())


def test_a_feature_processor_weighs_before_the_lookup() -> None:
    config = group(table("t", "f"), table("u", "g"))
    config.has_feature_processor = config.is_weighted = True
    plain = GroupedPooledEmbeddingsLookup([group(table("t", "f"), table("u", "g"))])
    processed = GroupedPooledEmbeddingsLookup([config], feature_processor=Doubled())
    processed.load_state_dict(plain.state_dict())
    torch.testing.assert_close(processed(features()), 2 * plain(features()))


def weight_gradients(rank: int, world_size: int) -> list[list[float]]:
    """Of weights of a lookup: scaled, not scaled, as a replica, with gradient division off."""
    found = []
    for scale, kind, division in [(True, None, True), (False, None, True), (True, "dp", True), (True, None, False)]:
        config = group(table("t", "f"), table("u", "g"))
        config.is_weighted = True
        lookup = GroupedPooledEmbeddingsLookup(
            [config],
            pg=dist.group.WORLD,
            scale_weight_gradients=scale,
            sharding_type=ShardingType.DATA_PARALLEL if kind else None,
        )
        lookup.load_state_dict({name: torch.ones(ROWS, DIM) for name in lookup.state_dict()})
        weights = torch.ones(5, requires_grad=True)
        plain = features()
        set_gradient_division(division)
        lookup(KeyedJaggedTensor(plain.keys(), plain.values(), weights, plain.lengths())).sum().backward()
        set_gradient_division(True)
        assert weights.grad is not None
        found.append(weights.grad.tolist())
    return found


def test_gradients_of_weights_undo_the_division_of_the_collectives() -> None:
    one, twice = [float(DIM)] * 5, [2.0 * DIM] * 5
    assert run_ranks(2, weight_gradients) == [[twice, one, one, one]] * 2


def test_small_helpers() -> None:
    x = torch.arange(6.0, requires_grad=True)
    assert fx_wrap_tensor_view2d(x, 2, 3).shape == (2, 3)
    dummy = torch.zeros(2, 0)
    assert embeddings_cat_empty_rank_handle([], dummy, dim=1) is dummy
    assert embeddings_cat_empty_rank_handle([torch.ones(2, 1), torch.ones(2, 2)], dummy, dim=1).shape == (2, 3)
    scaled: Any = CommOpGradientScaling.apply(x, 3)
    assert torch.equal(scaled, x)
    scaled.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 6


@pytest.mark.parametrize(
    ("kernel", "location"),
    [
        ("dense", "DEVICE"),
        ("fused", "DEVICE"),
        ("fused_uvm", "MANAGED"),
        ("fused_uvm_caching", "MANAGED_CACHING"),
        ("quant", "DEVICE"),
        ("quant_uvm", "MANAGED"),
        ("quant_uvm_caching", "MANAGED_CACHING"),
    ],
)
def test_where_a_kernel_keeps_its_rows(kernel: str, location: str) -> None:
    assert compute_kernel_to_embedding_location(EmbeddingComputeKernel(kernel)) is EmbeddingLocation[location]


def test_sharders_are_float_or_quantized() -> None:
    assert issubclass(EmbeddingBagCollectionSharder, BaseEmbeddingSharder)
    assert issubclass(QuantEmbeddingBagCollectionSharder, BaseQuantEmbeddingSharder)
    assert EmbeddingBagCollectionSharder(fused_params={"learning_rate": 1.0}).fused_params == {"learning_rate": 1.0}


class AnySequence(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise"]


def sequences(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name=n, feature_names=[f])
        for n, f in (("t", "f"), ("u", "g"))
    ]
    module = EmbeddingCollection(tables=tables)
    expected = {name: jagged.values().detach() for name, jagged in module(features()).items()}
    plan = construct_module_sharding_plan(
        module, {"t": row_wise(), "u": table_wise(rank=0)}, AnySequence(), 2, world_size, "cpu"
    )
    group_ = torch.distributed.group.WORLD
    sharded = AnySequence().shard(module, plan, ShardingEnv.from_process_group(group_), torch.device("cpu"))
    assert isinstance(sharded, ShardedEmbeddingCollection) and isinstance(sharded, ShardedEmbeddingModule)
    assert isinstance(sharded, ModuleShardingMixIn)
    assert all(isinstance(s, FeatureShardingMixIn) for s in sharded.shardings.values())
    context = sharded.create_context()
    assert isinstance(context, EmbeddingCollectionContext)
    ids = sharded.input_dist(context, features()).wait().wait()
    found = sharded.output_dist(context, sharded.compute(context, ids))
    assert isinstance(found, EmbeddingCollectionAwaitable)
    return all(torch.allclose(found[name].values(), expected[name]) for name in expected)


def one_bag(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    expected = bag(ids, offsets).detach()
    sharder = EmbeddingBagSharder()
    plan = construct_module_sharding_plan(bag, {"weight": table_wise(rank=1)}, sharder, 2, world_size, "cpu")
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharded = sharder.shard(bag, plan, env, torch.device("cpu"))
    assert isinstance(sharded, ShardedEmbeddingBag)
    found = sharded(ids, offsets)
    assert isinstance(found, EmbeddingAwaitable) and isinstance(found, LazyAwaitable)
    assert issubclass(EmbeddingBagCollectionAwaitable, LazyAwaitable)
    context = sharded.create_context()
    received = sharded.input_dist(context, ids, offsets).wait().wait()
    # What its record_stream keeps alive is what the exchange noted.
    assert isinstance(context, EmbeddingBagCollectionContext) and len(context.sharding_contexts) == 1
    stepwise = sharded.output_dist(context, sharded.compute(context, received)).wait()
    return torch.allclose(found.wait(), expected) and torch.equal(found.wait(), stepwise)


def test_a_sharded_collection_and_a_sharded_bag_step_by_step() -> None:
    assert run_ranks(2, sequences) == [True, True]
    assert run_ranks(2, one_bag) == [True, True]
