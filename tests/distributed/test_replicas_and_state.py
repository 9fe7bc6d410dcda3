"""Replicas on real ranks apply the mean of all gradients; optimizer state is keyed and sharded as TorchRec writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from recinfer.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from recinfer.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.distributed.types import DataType, ShardingType
from recinfer.modules.embedding_configs import PoolingType
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks


def config(pooling: PoolingType, optimizer: str, weighted: bool, dims: tuple[int, int]) -> GroupedEmbeddingConfig:
    tables = [
        ShardedEmbeddingTable(
            num_embeddings=rows,
            embedding_dim=dim,
            name=name,
            feature_names=features,
            local_rows=rows,
            local_cols=dim,
            embedding_names=features,
            compute_kernel=EmbeddingComputeKernel.FUSED,
        )
        for name, rows, dim, features in (("a", 7, dims[0], ["f", "g"]), ("b", 3, dims[1], ["h"]))
    ]
    return GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=pooling,
        is_weighted=weighted,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=tables,
        fused_params={"optimizer": optimizer, "learning_rate": 0.1},
    )


def batch(rank: int, step: int, bags: int, weighted: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (3 * bags,), generator=generator)
    counts = lengths.view(3, bags).sum(dim=1).tolist()
    ids = torch.cat([torch.randint(0, r, (n,), generator=generator) for r, n in zip((7, 7, 3), counts)])
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    return KeyedJaggedTensor(["f", "g", "h"], ids, weights, lengths=lengths)


def train(rank: int, world: int, pooling: PoolingType, optimizer: str, weighted: bool, dims: tuple[int, int]) -> Any:
    torch.manual_seed(rank)
    grouped = config(pooling, optimizer, weighted, dims)
    if pooling is PoolingType.NONE:
        lookup: Any = GroupedEmbeddingsLookup([grouped], pg=dist.group.WORLD, sharding_type=ShardingType.DATA_PARALLEL)
    else:
        lookup = GroupedPooledEmbeddingsLookup([grouped], pg=dist.group.WORLD, sharding_type=ShardingType.DATA_PARALLEL)
    lookup.sync_replicas()
    start = [w.clone() for w in lookup.split_embedding_weights()]
    for step in range(3):
        out = lookup(batch(rank, step, rank + 1 if step else rank, weighted))
        out.backward(torch.ones_like(out) * (rank + 1))
    states = [v for s in lookup.fused_optimizer.state_dict()["state"].values() for v in s.values()]
    return start, lookup.split_embedding_weights(), [s.clone() for s in states]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", ["SGD", "ROWWISE_ADAGRAD", "ADAM"])
@pytest.mark.parametrize("pooling", list(PoolingType))
def test_replicas_stay_equal(world: int, optimizer: str, pooling: PoolingType) -> None:
    dims = (4, 4) if pooling is PoolingType.NONE else (5, 4)
    results = run_ranks(world, train, pooling, optimizer, pooling is PoolingType.SUM, dims)
    for part in range(3):
        for rank in range(1, world):
            assert all(torch.equal(a, b) for a, b in zip(results[0][part], results[rank][part]))
    assert any(not torch.equal(a, b) for a, b in zip(results[0][0], results[0][1]))
    if optimizer == "SGD" and pooling is PoolingType.SUM:  # linear: the mean of what each rank would do
        expected = [w.clone() for w in results[0][0]]
        for rank in range(world):
            for step in (0, 1, 2):
                kjt = batch(rank, step, rank + 1 if step else rank, True).to_dict()
                for table, names in enumerate((["f", "g"], ["h"])):
                    for name in names:
                        jagged = kjt[name]
                        change = (jagged.weights() * (rank + 1) * -0.1 / world).unsqueeze(1)
                        expected[table].index_add_(0, jagged.values(), change.expand(-1, expected[table].shape[1]))
        for got, want in zip(results[0][1], expected):
            torch.testing.assert_close(got, want)


def columns(rank: int, world: int, optimizer: str) -> dict[str, Any]:
    shards = [ShardMetadata([0, 4 * r], [6, 4], f"rank:{world - 1 - r}/cpu") for r in range(world)]
    whole = ShardedTensorMetadata(shards_metadata=shards, size=torch.Size([6, 4 * world]))
    table = ShardedEmbeddingTable(
        num_embeddings=6,
        embedding_dim=4 * world,
        name="t",
        feature_names=["f"],
        local_rows=6,
        local_cols=4,
        embedding_names=["f"],
        compute_kernel=EmbeddingComputeKernel.FUSED,
        local_metadata=shards[world - 1 - rank],
        global_metadata=whole,
    )
    grouped = GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=[table],
        fused_params={"optimizer": optimizer},
    )
    lookup = GroupedPooledEmbeddingsLookup([grouped], pg=dist.group.WORLD)
    state = lookup.fused_optimizer.state_dict()["state"]["t.weight"]
    lookup.load_state_dict(lookup.state_dict())
    lookup.fused_optimizer.load_state_dict(lookup.fused_optimizer.state_dict())
    told = {"weight": tuple(lookup.state_dict()["t.weight"].size())}
    for key, value in state.items():
        if isinstance(value, ShardedTensor):
            told[key] = (tuple(value.size()), [tuple(s.metadata.shard_offsets) for s in value.local_shards()])
        else:
            told[key] = tuple(value.shape)
    return told


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("SGD", {}),
        ("ROWWISE_ADAGRAD", {"t.momentum1": ((12,), [(6,)])}),
        ("ADAGRAD", {"t.momentum1": ((6, 8), [(0, 4)])}),
        (
            "PARTIAL_ROWWISE_ADAM",
            {"t.momentum1": ((6, 8), [(0, 4)]), "t.exp_avg_sq": ((12,), [(6,)]), "t.iter": (1,)},
        ),
    ],
)
def test_state_of_a_table_cut_in_columns(optimizer: str, expected: dict[str, Any]) -> None:
    told = run_ranks(2, columns, optimizer)
    assert told[0] == {"weight": (6, 8), **expected}
