"""TorchRec's sharding tutorial with the package's name replaced: ``python examples/tutorial_sharding.py``.

Other changes: the processes use gloo on the CPU instead of NCCL on two GPUs (the topology still describes GPUs), the
tables start on the meta device, and the port is a free one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import cast

import torch
import torch.distributed as dist

import recinfer
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.types import ShardingPlan, ShardingType

large_table_cnt = 2
small_table_cnt = 2
large_tables = [
    recinfer.EmbeddingBagConfig(
        name="large_table_" + str(i),
        embedding_dim=64,
        num_embeddings=4096,
        feature_names=["large_table_feature_" + str(i)],
        pooling=recinfer.PoolingType.SUM,
    )
    for i in range(large_table_cnt)
]
small_tables = [
    recinfer.EmbeddingBagConfig(
        name="small_table_" + str(i),
        embedding_dim=64,
        num_embeddings=1024,
        feature_names=["small_table_feature_" + str(i)],
        pooling=recinfer.PoolingType.SUM,
    )
    for i in range(small_table_cnt)
]


def gen_constraints(sharding_type: ShardingType = ShardingType.TABLE_WISE) -> dict[str, ParameterConstraints]:
    """One sharding type for all tables."""
    return {t.name: ParameterConstraints(sharding_types=[sharding_type.value]) for t in large_tables + small_tables}


def single_rank_execution(
    rank: int,
    world_size: int,
    constraints: dict[str, ParameterConstraints],
    module: torch.nn.Module,
    backend: str,
) -> None:
    """The program of each rank: plan together, shard, and look up."""
    from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from recinfer.distributed.model_parallel import DistributedModelParallel
    from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
    from recinfer.distributed.types import ModuleSharder, ShardingEnv
    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

    def init_distributed_single_host(rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
        os.environ["RANK"] = f"{rank}"
        os.environ["WORLD_SIZE"] = f"{world_size}"
        dist.init_process_group(rank=rank, world_size=world_size, backend=backend)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    if backend == "nccl":
        device = torch.device(f"cuda:{rank}")
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    topology = Topology(world_size=world_size, compute_device="cuda")
    pg = init_distributed_single_host(rank, world_size, backend)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    plan: ShardingPlan = planner.collective_plan(module, sharders, pg)
    sharded_model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(pg),
        plan=plan,
        sharders=sharders,
        device=device,
    )
    print(f"rank:{rank},sharding plan: {plan.plan}", flush=True)

    # Beyond the tutorial: each rank looks up a batch of two.
    features = [name for table in large_tables + small_tables for name in table.feature_names]
    ids = torch.arange(2 * len(features), device=device) + rank
    lengths = torch.ones(2 * len(features), dtype=torch.int32, device=device)
    pooled = sharded_model(KeyedJaggedTensor(keys=features, values=ids, lengths=lengths))
    print(f"rank:{rank},output: {tuple(pooled.values().shape)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def spmd_sharing_simulation(sharding_type: ShardingType = ShardingType.TABLE_WISE, world_size: int = 2) -> None:
    """Run ``world_size`` ranks as processes."""
    ebc = recinfer.EmbeddingBagCollection(device=torch.device("meta"), tables=large_tables + small_tables)
    ctx = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(world_size):
        p = ctx.Process(
            target=single_rank_execution,
            args=(rank, world_size, gen_constraints(sharding_type), ebc, "gloo"),
        )
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
        assert p.exitcode == 0


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    kinds = sys.argv[1:] or ["table_wise", "row_wise", "column_wise", "data_parallel"]
    for kind in kinds:
        # The ranks meet at a store of this process, so that the port is taken from the moment it is chosen.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ["MASTER_PORT"] = str(store.port)
        spmd_sharing_simulation(ShardingType(kind))
