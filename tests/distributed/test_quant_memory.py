"""The memory that holds the rows does not change results: managed memory and caches."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from recinfer.distributed.embedding_types import EmbeddingComputeKernel
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import ParameterSharding, ShardingEnv
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from tests.distributed.test_quant_sharded import TYPE_IDS, TYPES, packed_twin, plan_for
from tests.quant.cases import float_bags, random_features

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
ODD = [("a", 40, 7, ["f0"]), ("b", 1, 2, ["f1"]), ("c", 300, 33, ["f2", "f3"]), ("d", 77, 64, ["f4"])]
UVM = ["quant_uvm", "quant_uvm_caching"]


def with_kernels(plan: dict[str, ParameterSharding], kernels: dict[str, str]) -> dict[str, ParameterSharding]:
    return {name: replace(sharding, compute_kernel=kernels[name]) for name, sharding in plan.items()}


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
