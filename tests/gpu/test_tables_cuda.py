"""Tables that train on a GPU: FBGEMM's counts of steps and its cache of rows, against the same tables without either."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from recinfer.distributed.embedding_types import EmbeddingComputeKernel
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.tables.cpu import TableGroup
from recinfer.distributed.tables.cuda import ModuleTableGroup
from recinfer.distributed.tables.replicas import Replicas
from recinfer.distributed.types import CacheAlgorithm, DataType
from recinfer.modules.embedding_configs import PoolingType
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_replicas_and_state import config
from tests.distributed.test_table_group import EVEN, call, filled, output_gradient
from tests.gpu.devices import DEVICES, skip_unless_fbgemm_has

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
GPU = torch.device("cuda", 0)


def steps_of_replicas(rank: int, world: int, optimizer: str, kind: str) -> list[Tensor]:
    """Three steps of FBGEMM's module on a device and of ours on the CPU, with lookups in between that are no steps."""
    place = torch.device(kind)
    settings = FusedSettings.from_params({"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-4})
    on_gpu, on_cpu = (
        ModuleTableGroup(EVEN, PoolingType.SUM, settings, device=place),
        TableGroup(EVEN, PoolingType.SUM, settings),
    )
    for group, device in ((on_gpu, place), (on_cpu, torch.device("cpu"))):
        filled(group)
        group.replicas = Replicas(dist.group.WORLD)
        for step in range(1, 4):
            batch = call(EVEN, 10 * step + rank)
            ids, offsets = batch.ids.to(device), batch.offsets.to(device)
            with torch.no_grad():
                group(ids, offsets)
            out = group(ids, offsets)
            out.backward(output_gradient(out, step + rank).to(device))
        assert group.steps is None or int(group.steps) == 3
    for mine, its in zip(on_gpu.table_weights(), on_cpu.table_weights()):
        torch.testing.assert_close(mine.cpu(), its, rtol=1e-4, atol=1e-5)
    return [rows.cpu() for rows in on_gpu.table_weights()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["ROWWISE_ADAGRAD", "ADAM", "LAMB"])
def test_replicas_take_the_cpus_steps(optimizer: str, device: str) -> None:
    skip_unless_fbgemm_has(optimizer, device)
    here, there = run_ranks(2, steps_of_replicas, optimizer, device)
    assert all(torch.equal(a, b) for a, b in zip(here, there))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("algorithm", list(CacheAlgorithm))
def test_state_does_not_see_the_cache(algorithm: CacheAlgorithm) -> None:
    grouped = config(PoolingType.SUM, "SGD", False, (4, 4))
    plain = GroupedPooledEmbeddingsLookup([grouped], GPU)
    grouped = config(PoolingType.SUM, "SGD", False, (4, 4))
    grouped.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING
    assert grouped.fused_params is not None
    grouped.fused_params |= {"cache_algorithm": algorithm, "cache_precision": DataType.FP32, "cache_load_factor": 1.0}
    cached = GroupedPooledEmbeddingsLookup([grouped], GPU)
    cached.load_state_dict(plain.state_dict())
    first = {name: rows.clone() for name, rows in plain.state_dict().items()}
    ids, lengths = torch.tensor([1, 2, 0], device=GPU), torch.ones(3, dtype=torch.int64, device=GPU)
    features = KeyedJaggedTensor(["f", "g", "h"], ids, lengths=lengths)
    before = cached(features).detach()
    for lookup in (plain, cached):
        lookup(features).sum().backward()
    for name, rows in cached.state_dict().items():
        torch.testing.assert_close(rows, plain.state_dict()[name])
        assert not torch.equal(rows, first[name])
    cached(features)
    cached.load_state_dict(first)
    torch.testing.assert_close(cached(features), before)
