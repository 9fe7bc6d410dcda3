"""The documented inference lookups and their sharding give the unsharded quantized module's numbers."""

from __future__ import annotations

import pytest
import torch

from recinfer.distributed.embedding_lookup import (
    InferGroupedEmbeddingsLookup,
    InferGroupedLookupMixin,
    InferGroupedPooledEmbeddingsLookup,
    MetaInferGroupedEmbeddingsLookup,
    MetaInferGroupedPooledEmbeddingsLookup,
)
from recinfer.distributed.embedding_sharding import EmbeddingShardingInfo
from recinfer.distributed.embedding_types import (
    BaseEmbeddingLookup,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    KJTList,
    ShardedEmbeddingTable,
)
from recinfer.distributed.quant_embeddingbag import create_infer_embedding_bag_sharding
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import CheckpointError, ConfigError, InputError
from recinfer.modules.embedding_configs import DataType, EmbeddingTableConfig, PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.tbe import embedding_location
from tests.distributed.plans import sharding
from tests.quant.cases import float_bags, quantized_sequences, random_features

KINDS = {"table_wise": [1], "row_wise": [0, 1], "column_wise": [0, 1]}


def infos(module: EmbeddingBagCollection, kind: str) -> list[EmbeddingShardingInfo]:
    packed = {name.split(".")[-2]: rows for name, rows in module.state_dict().items() if name.endswith(".weight")}
    found = []
    for config in module.embedding_bag_configs():
        table = EmbeddingTableConfig(
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            name=config.name,
            data_type=config.data_type,
            feature_names=list(config.feature_names),
            pooling=config.pooling,
            is_weighted=module.is_weighted(),
            embedding_names=[],
        )
        plan = sharding(config, kind, KINDS[kind], "cpu", 2)
        plan.compute_kernel = "quant"
        found.append(EmbeddingShardingInfo(table, plan, packed[config.name]))
    return found


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.INT4, DataType.FP16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_steps_give_the_unsharded_vectors(kind: str, weighted: bool, data_type: DataType) -> None:
    poolings = [PoolingType.SUM, PoolingType.MEAN, PoolingType.MEAN, PoolingType.SUM]
    module = EmbeddingBagCollection.from_float(
        float_bags(poolings, weighted), per_table=dict.fromkeys("abcd", data_type)
    )
    features = random_features(module.embedding_bag_configs(), 6, weighted=weighted)
    made = create_infer_embedding_bag_sharding(kind, infos(module, kind), ShardingEnv.from_local(2, 0))
    context = made.create_context(features)
    ids = made.create_input_dist()(features)
    assert isinstance(ids, KJTList) and [len(part.keys()) for part in ids] == made.features_per_rank()
    lookup = made.create_lookup()
    assert isinstance(lookup, InferGroupedPooledEmbeddingsLookup) and isinstance(lookup, BaseEmbeddingLookup)
    found = made.create_output_dist()(lookup(ids), context)
    expected = module(features)
    assert made.embedding_dims() == expected.length_per_key()
    torch.testing.assert_close(found, expected.values(), rtol=1e-5, atol=1e-5)


def test_packed_rows_are_state_and_nothing_trains() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    made = create_infer_embedding_bag_sharding("row_wise", infos(module, "row_wise"), ShardingEnv.from_local(2, 0))
    one = made.create_lookup()
    two = InferGroupedPooledEmbeddingsLookup(made.layout.groups_per_rank, 2, device=torch.device("cpu"))
    assert isinstance(two, InferGroupedLookupMixin) and list(two.named_parameters()) == []
    state = one.state_dict()
    assert [name for name, _ in one.named_buffers("x")] == [f"x.{name}" for name in state]
    two.load_state_dict(state)
    ids = made.create_input_dist()(random_features(module.embedding_bag_configs(), 4))
    for mine, theirs in zip(two(ids), one(ids)):
        assert torch.equal(mine, theirs)
    name, rows = next(iter(state.items()))
    with pytest.raises(CheckpointError, match=f"missing.*{name}"):
        two.load_state_dict({k: v for k, v in state.items() if k != name})
    with pytest.raises(CheckpointError, match="expected uint8"):
        two.load_state_dict({**state, name: rows[:, :-1]})
    tbes = one.get_tbes_to_register()
    assert sum(len(config.embedding_tables) for config in tbes.values()) == len(state)
    alone = MetaInferGroupedPooledEmbeddingsLookup(made.layout.groups_per_rank[0], torch.device("cpu"))
    alone.load_state_dict(one.lookups[0].state_dict())
    assert torch.equal(alone(ids[0]), one(ids)[0])
    assert list(alone.named_parameters()) == [] and len(list(alone.named_buffers())) == len(alone.state_dict())


def test_rows_of_ids() -> None:
    module = quantized_sequences(dict.fromkeys("abcd", DataType.INT8))
    config = module.embedding_configs()[0]
    packed = next(rows for name, rows in module.state_dict().items() if f".{config.name}." in name)
    table = ShardedEmbeddingTable(
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        name=config.name,
        data_type=config.data_type,
        feature_names=list(config.feature_names),
        pooling=PoolingType.NONE,
        compute_kernel=EmbeddingComputeKernel.QUANT,
        local_rows=config.num_embeddings,
        local_cols=config.embedding_dim,
    )
    group = GroupedEmbeddingConfig(
        config.data_type, PoolingType.NONE, False, False, EmbeddingComputeKernel.QUANT, [table]
    )
    everything = random_features(module.embedding_configs(), 5)
    features = everything.permute([everything.keys().index(f) for f in config.feature_names])
    one = MetaInferGroupedEmbeddingsLookup([group], torch.device("cpu"))
    one.load_state_dict({f"{config.name}.weight": packed})
    expected = module(everything)
    own = [value for name, value in expected.items() if name.partition("@")[0] in config.feature_names]
    wanted = torch.cat([jagged.values() for jagged in own[: len(config.feature_names)]])
    assert torch.equal(one(features), wanted)
    many = InferGroupedEmbeddingsLookup([[group], []], 2, device=torch.device("cpu"))
    many.load_state_dict(one.state_dict())
    first, second = many(KJTList([features, features.permute([])]))
    assert torch.equal(first, wanted) and second.numel() == 0
    features.values()[0] = config.num_embeddings
    with pytest.raises(InputError, match="out of range"):
        one(features)


def test_compute_kernels_say_where_rows_are() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    tables = infos(module, "row_wise")
    kernels = dict(zip("abcd", ["quant", "quant_uvm", "quant_uvm_caching", "quant_uvm"]))
    for info in tables:
        info.param_sharding.compute_kernel = kernels[info.embedding_config.name]
    made = create_infer_embedding_bag_sharding("row_wise", tables, ShardingEnv.from_local(2, 0))
    lookup = made.create_lookup()
    shards = [s for of_rank in lookup.lookups for s in of_rank.rank.tables]
    assert {s.rect.table for s in shards} == set("abcd")
    for shard in shards:
        location = embedding_location(shard.memory, torch.device("cuda"))
        assert location.name == {"quant": "DEVICE", "quant_uvm": "MANAGED"}.get(
            kernels[shard.rect.table], "MANAGED_CACHING"
        )
    for tbe, group in lookup.get_tbes_to_register().items():
        assert [name for name, *_ in tbe.embedding_specs] == [t.name for t in group.embedding_tables]
        assert {t.compute_kernel for t in group.embedding_tables} == {group.compute_kernel}
    features = random_features(module.embedding_bag_configs(), 6)
    found = made.create_output_dist()(lookup(made.create_input_dist()(features)), made.create_context(features))
    torch.testing.assert_close(found, module(features).values(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["quant", "quant_uvm", "quant_uvm_caching"])
def test_kernels_on_a_gpu(kernel: str) -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    tables = infos(module, "row_wise")
    for info in tables:
        info.param_sharding.compute_kernel = kernel
        info.param_sharding.sharding_spec.shards[1:] = []
        info.param_sharding.sharding_spec.shards[0].shard_sizes[0] = info.embedding_config.num_embeddings
    device = torch.device("cuda")
    made = create_infer_embedding_bag_sharding("row_wise", tables, ShardingEnv.from_local(1, 0), device)
    lookup = made.create_lookup()
    (tbe,) = lookup.get_tbes_to_register()
    assert (tbe.weights_dev.numel() > tbe.weights_uvm.numel()) == (kernel == "quant")
    for seed in range(3):  # the second and third find rows in the cache
        features = random_features(module.embedding_bag_configs(), 6, seed=seed)
        ids, context = made.create_input_dist()(features.to(device)), made.create_context(features.to(device))
        found = made.create_output_dist(device)(lookup(ids), context)
        torch.testing.assert_close(found.cpu(), module(features).values(), rtol=1e-5, atol=1e-5)
    lookup.load_state_dict({name: torch.zeros_like(rows) for name, rows in lookup.state_dict().items()})
    assert not any(part.any() for part in lookup(ids))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_ids_are_cut_on_the_device_where_they_are(device: str) -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    made = create_infer_embedding_bag_sharding("row_wise", infos(module, "row_wise"), ShardingEnv.from_local(2, 0))
    features = random_features(module.embedding_bag_configs(), 6)
    dist = made.create_input_dist()
    here, there = dist(features), dist(features.to(torch.device(device)))
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine.values(), theirs.values()) and torch.equal(mine.lengths(), theirs.lengths())
    (expansion,) = [e for (kind, _), e in dist._expand._expansions.items() if kind.type == device]
    assert expansion.block_sizes.device.type == device


def test_misuse_is_named() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    env = ShardingEnv.from_local(2, 0)
    with pytest.raises(ConfigError, match="data_parallel"):
        create_infer_embedding_bag_sharding("data_parallel", infos(module, "row_wise"), env)
    with pytest.raises(ConfigError, match="there are tables of row_wise"):
        create_infer_embedding_bag_sharding("table_wise", infos(module, "row_wise"), env)
    with pytest.raises(ConfigError, match="groups of 1 ranks; expected 2"):
        InferGroupedPooledEmbeddingsLookup([[]], 2)
