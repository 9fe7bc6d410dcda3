"""Replicas whose ranks all have a batch of no examples: nothing to exchange, nothing to update."""

from __future__ import annotations

import torch

from recinfer.distributed.sharding_plan import construct_module_sharding_plan, data_parallel
from recinfer.distributed.types import ShardingEnv
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import AnySharder


def nothing_at_all(rank: int, world_size: int) -> bool:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])]
    module = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    plan = construct_module_sharding_plan(module, {"t": data_parallel()}, AnySharder(), 2, world_size, "cpu")
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharded = AnySharder().shard(module, plan, env, torch.device("cpu"))
    before = sharded.state_dict()["embedding_bags.t.weight"].clone()
    empty = torch.empty(0, dtype=torch.int64)
    sharded(KeyedJaggedTensor(keys=["f"], values=empty, lengths=empty, stride=0)).values().sum().backward()
    return torch.equal(sharded.state_dict()["embedding_bags.t.weight"], before)


def test_no_rank_has_an_example() -> None:
    assert run_ranks(2, nothing_at_all) == [True, True]
