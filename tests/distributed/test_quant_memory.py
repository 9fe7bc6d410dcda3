"""The memory that holds the rows does not change results: joined columns, managed memory and caches."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from recinfer.distributed.embedding_types import EmbeddingComputeKernel
from recinfer.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import ParameterSharding, ShardingEnv
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.quant.buffers import Buffers
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.tbe import TableBatch
from tests.distributed.test_quant_sharded import TYPE_IDS, TYPES, packed_twin, plan_for
from tests.quant.cases import float_bags, quantized_sequences, random_features

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
ODD = [("a", 40, 7, ["f0"]), ("b", 1, 2, ["f1"]), ("c", 300, 33, ["f2", "f3"]), ("d", 77, 64, ["f4"])]
UVM = ["quant_uvm", "quant_uvm_caching"]


def with_kernels(plan: dict[str, ParameterSharding], kernels: dict[str, str]) -> dict[str, ParameterSharding]:
    return {name: replace(sharding, compute_kernel=kernels[name]) for name, sharding in plan.items()}


@pytest.mark.parametrize("kind", ["column_wise", "grid", "mixed"])
@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
def test_joined_columns_are_whole_tables_again(types: dict[str, DataType], kind: str) -> None:
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, SUM, MEAN], shapes=ODD), per_table=types)
    env = ShardingEnv.from_local(3, 0)
    shared = ShardedQuantEmbeddingBagCollection(module, plan_for(module, kind, 3), env)
    joined = packed_twin(module, shared, world_size=3, join_columns=True)
    apart = packed_twin(module, shared, world_size=3)
    assert len(joined.fused_lookup.batch.tables) == 4 <= len(apart.fused_lookup.batch.tables)
    if kind == "column_wise":  # every table is whole again, in one buffer and in order: the op checks the ids
        assert joined.fused_lookup.batch.knows_rows
    for batch in (0, 1, 17):
        features = random_features(module.embedding_bag_configs(), batch, seed=batch)
        want = module(features).values()
        assert torch.equal(joined(features).values(), want) and torch.equal(apart(features).values(), want)
    features = random_features(module.embedding_bag_configs(), 9)
    for bad in (-1, 77, 10_000):
        features.values()[-1] = bad
        with pytest.raises(InputError, match=f"feature 'f4', sample [0-8]: id {bad} is out of range"):
            joined(features)


@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
def test_joined_columns_of_sequences(types: dict[str, DataType]) -> None:
    module = quantized_sequences(types, ODD)
    shared = ShardedQuantEmbeddingCollection(module, plan_for(module, "mixed", 2), ShardingEnv.from_local(2, 0))
    joined = packed_twin(module, shared, world_size=2, join_columns=True)
    features = random_features(module.embedding_configs(), 12)
    want, got = module(features), joined(features)
    assert all(torch.equal(got[name].values(), want[name].values()) for name in want)


@pytest.mark.parametrize("fused", [None, False])
def test_a_plan_with_uvm_kernels_runs_on_cpu(fused: bool | None) -> None:
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, SUM, SUM]))
    kernels = dict(zip("abcd", ["quant", *UVM, "quant_uvm"]))
    plan = with_kernels(plan_for(module, "mixed", 2), kernels)
    sharded = ShardedQuantEmbeddingBagCollection(module, plan, ShardingEnv.from_local(2, 0), fused=fused)
    packed = packed_twin(module, sharded, world_size=2, fused=fused, kernels=kernels)
    features = random_features(module.embedding_bag_configs(), 9)
    want = module(features).values()
    for run in (sharded, packed):
        torch.testing.assert_close(run(features).values(), want, rtol=1e-5, atol=1e-5)
        tables = [t for group in run.tbes_configs().values() for t in group.embedding_tables]
        assert {t.name: t.compute_kernel for t in tables} == {
            name: EmbeddingComputeKernel(kernel) for name, kernel in kernels.items()
        }


@pytest.mark.parametrize("memory", ["managed", "cached"])
def test_two_buffers_behind_one_call(memory: str) -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    whole = module._lookup.batch
    here = [t.rect.table for t in whole.tables[::2]]
    reads = [read if read.rect.table in here else replace(read, memory=memory) for read in whole.reads]
    near, other = module.storage.near, module.storage.near.clone()
    split = TableBatch(reads, SUM, Buffers(near, other))
    assert not split.knows_rows
    features = random_features(module.embedding_bag_configs(), 9)
    want = whole(features.values(), features.offsets())
    assert torch.equal(split(features.values(), features.offsets()), want)
    assert torch.equal(split.fbgemm_module()(features.values(), features.offsets()), want)
    other.zero_()
    assert not torch.equal(split(features.values(), features.offsets()), want)
    alone = TableBatch(reads, SUM, Buffers(near))  # without a second buffer all is in the first
    assert torch.equal(alone(features.values(), features.offsets()), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["quant", *UVM])
@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
def test_kernels_on_a_gpu_equal_the_cpu(types: dict[str, DataType], kernel: str) -> None:
    shapes = [("a", 400, 8, ["f0"]), ("b", 1, 16, ["f1"]), ("c", 3000, 24, ["f2", "f3"]), ("d", 77, 8, ["f4"])]
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, SUM, SUM], shapes=shapes), per_table=types)
    kernels = dict(zip("abcd", [kernel, "quant", kernel, kernel]))
    plan = with_kernels(plan_for(module, "table_wise", 1, "cuda"), kernels)
    sharded = ShardedQuantEmbeddingBagCollection(module, plan, ShardingEnv.from_local(1, 0))
    for seed in range(3):  # the second and third find rows in the cache
        features = random_features(module.embedding_bag_configs(), 64, seed=seed)
        got = sharded(features.to(torch.device("cuda"))).values().cpu()
        torch.testing.assert_close(got, module(features).values(), rtol=1e-3, atol=1e-3)
    locations = {table.rect.table: table.memory for lookup in sharded._built().lookups for table in lookup.tables}
    assert locations["a"] == {"quant": "near", "quant_uvm": "managed", "quant_uvm_caching": "cached"}[kernel]


def test_a_table_of_100_million_rows_on_meta() -> None:
    configs = [
        EmbeddingBagConfig(
            num_embeddings=100_000_000, embedding_dim=128, name=n, feature_names=[f"f{n}"], data_type=DataType.INT8
        )
        for n in "ab"
    ]
    module = EmbeddingBagCollection(configs, False, device="meta")
    assert module.placed["b"].offset >= 100_000_000 * 132 > 2**31
    assert module._lookup.batch._head[3].dtype == torch.int64
    sharded = ShardedQuantEmbeddingBagCollection(module, plan_for(module, "row_wise", 4), ShardingEnv.from_local(4, 0))
    assert [s.rect.rows for s in sharded.shards if s.rect.table == "a"] == [25_000_000] * 4
    features = random_features(configs, 3).to(torch.device("meta"))
    assert module(features).values().shape == (3, 256)


def test_threads_take_turns_at_the_cache_of_a_batch() -> None:
    """A module with a cache fills it and then looks up. The module here detects whether two threads are in it at once."""
    module = EmbeddingBagCollection.from_float(float_bags([SUM] * 4))
    batch = module._lookup.batch
    inside, overlaps = threading.Semaphore(1), []

    def through_cache(*given: object) -> torch.Tensor:
        alone = inside.acquire(blocking=False)
        overlaps.append(not alone)
        time.sleep(0.01)
        if alone:
            inside.release()
        return torch.zeros(1)

    batch.__dict__["_through_cache"] = through_cache
    ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: batch(ids, offsets), range(12)))
    assert len(overlaps) == 12 and not any(overlaps)
