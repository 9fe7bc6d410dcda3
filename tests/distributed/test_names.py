"""Helpers that programs import by TorchRec's names: unsharded modules, copies, slices of tables, sharders as data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.distributed import get_unsharded_module_names, sharded_model_copy
from recinfer.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from recinfer.distributed.embedding_types import EmbeddingComputeKernel
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from recinfer.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
from recinfer.distributed.planner.types import Perf, SharderData, ShardEstimator, Storage, StorageUsageType
from recinfer.distributed.planner.utils import build_sharder_data_map, sharder_name
from recinfer.distributed.types import KeyValueParams, ParameterSharding
from recinfer.errors import ConfigError
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import EBC, make_batch, make_model, optimizer_of, sharded


def names_and_copies(rank: int, world_size: int) -> dict[str, Any]:
    dmp = sharded(rank, world_size).eval()
    model, batch = dmp.module, make_batch(0, 0, 4)
    with sharded_model_copy("cpu"):
        copied = copy.deepcopy(model)
    with sharded_model_copy(None):
        shared = copy.deepcopy(model)
    expected = model(batch)[1][1]
    same = [torch.equal(m(batch)[1][1], expected) for m in (copied, shared)]
    slices = [name for name, p in dmp.named_parameters() if isinstance(p, TableBatchedEmbeddingSlice)]
    tables = [name for name, p in dmp.named_parameters() if ".embedding_bags." in name and p.numel()]
    optimizer = optimizer_of(dmp)
    dmp.train()(batch)[0].backward()
    optimizer.step()
    moved = model.eval()(batch)[1][1]
    return {
        "unsharded": get_unsharded_module_names(model),
        "same": same,
        "slices": slices,
        "tables": tables,
        "copy is apart": torch.equal(copied(batch)[1][1], expected),
        "shared follows": torch.equal(shared(batch)[1][1], moved) and not torch.equal(moved, expected),
    }


def test_unsharded_names_copies_and_slices_of_a_sharded_model() -> None:
    for found in run_ranks(2, names_and_copies):
        assert found["unsharded"] == ["model.dense_arch", "model.inter_arch", "model.over_arch", "loss_fn"]
        assert found["same"] == [True, True]
        assert found["slices"] == found["tables"] and found["tables"]
        assert found["copy is apart"] and found["shared follows"]


def test_a_model_without_sharded_modules_has_no_unsharded_names() -> None:
    assert get_unsharded_module_names(make_model()) == []


def test_a_slice_shares_memory_and_gradient_with_the_flat_tensor_and_is_copied_with_it() -> None:
    flat = nn.Parameter(torch.arange(12.0))
    slices = nn.ParameterList(
        [TableBatchedEmbeddingSlice(flat, 0, 4, 2, 2), TableBatchedEmbeddingSlice(flat, 4, 12, 4, 2)]
    )
    last: Any = slices[1]
    assert isinstance(last, nn.Parameter) and last.is_leaf and last.requires_grad and last.grad is None
    (flat * torch.arange(12.0)).sum().backward()
    assert torch.equal(last.grad, torch.arange(4.0, 12.0).view(4, 2))
    torch.optim.SGD(slices, lr=1.0).step()
    assert torch.equal(flat.detach(), torch.zeros(12))
    last.grad = torch.ones(4, 2)
    assert flat.grad is not None and torch.equal(flat.grad[4:], torch.ones(8))
    copied = copy.deepcopy(slices)
    with torch.no_grad():
        copied[0]._flat.fill_(3.0)
    assert torch.equal(copied[1].detach(), torch.full((4, 2), 3.0)) and not flat.detach().any()
    last.grad = None
    assert flat.grad is None and slices[0].grad is None
    (last * 2).sum().backward()  # used by itself it is a parameter like any other
    assert torch.equal(last.grad, torch.full((4, 2), 2.0)) and flat.grad is None


def test_a_slice_that_was_moved_is_copied_as_it_is() -> None:
    one = TableBatchedEmbeddingSlice(nn.Parameter(torch.zeros(4)), 0, 4, 2, 2)
    one.data = torch.ones(2, 2)
    assert torch.equal(copy.deepcopy(one).detach(), torch.ones(2, 2))


class OfTorchRec(ShardEstimator):
    """An estimator as TorchRec 1.8 has them: it is given SharderData by name."""

    def __init__(self, topology: Topology, constraints: Any = None) -> None:
        self.seen: list[Any] = []

    def estimate(self, sharding_options: Any, sharder_data_map: Any = None) -> None:  # type: ignore[override]
        self.seen.append(sharder_data_map)
        for option in sharding_options:
            for shard in option.shards:
                shard.perf, shard.storage = Perf(1.0, 0.0, 0.0, 0.0), Storage(hbm=0, ddr=16)


def test_an_estimator_of_torchrec_is_given_the_sharders_as_data() -> None:
    registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5}, qcomm_codecs_registry=registry)
    topology = Topology(world_size=2, compute_device="cpu")
    estimator = OfTorchRec(topology)
    planner = EmbeddingShardingPlanner(topology=topology, enumerator=EmbeddingEnumerator(topology, estimator=estimator))
    plan = planner.plan(make_model("meta"), [sharder])  # type: ignore[list-item]
    assert set(plan.plan) == {EBC}
    data: SharderData = estimator.seen[0][sharder_name(EmbeddingBagCollection)]
    assert data.fused_params["learning_rate"] == 0.5
    assert data.storage_usage_type is StorageUsageType.BASE
    assert data.qcomm_dtype_sizes["POOLED_EMBEDDINGS_ALL_TO_ALL"][0] == 2.0
    assert build_sharder_data_map({"s": EmbeddingBagCollectionSharder()})["s"].qcomm_dtype_sizes == {}


def test_key_value_params_travel_with_constraints_and_plans() -> None:
    params = KeyValueParams(ssd_storage_directory="/ssd", ps_hosts=(("::1", 2000),))
    assert hash(params) == hash(KeyValueParams(ssd_storage_directory="/ssd", ps_hosts=(("::1", 2000),)))
    assert ParameterConstraints(key_value_params=params).key_value_params is params
    assert "ssd" in repr(ParameterSharding("row_wise", "fused", key_value_params=params))
    with pytest.raises(ConfigError, match=r"compute kernel 'key_value' is not supported; expected one of: dense,"):
        EmbeddingComputeKernel("key_value")
