"""Golden states of sharded managed collisions, written by TorchRec 1.8 itself on 1, 2 and 4 gloo ranks.

    python -m tests.golden.managed_sharded       (in an environment with torchrec 1.8, without recinfer's own modules)

TorchRec resets rows of evicted ids by an operator that FBGEMM lacks on CPUs; the script replaces it by the same in Python.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

__all__ = ["FILE", "STEPS", "WORLDS", "train"]

FILE = Path(__file__).with_name("managed_sharded.npz")
WORLDS, STEPS = (1, 2, 4), 12
ROWS, DIM, IDS, BATCH, INTERVAL, RATE = 64, 8, 100_000, 16, 3, 0.1


class _Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> Any:
        return self.tables(features)


def _half(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.constant_(weight, 0.5)


def ids_of_step(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of the bags of two features, and their ids: few are frequent."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (2 * BATCH,), generator=random).int()
    ids = torch.randint(0, IDS, (3, int(lengths.sum())), generator=random)
    return lengths, ids.prod(0) // IDS**2


def train(library: str, pooled: bool = True) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], nn.Module]:
    """Train on this rank of the default process group: outputs of each step, this rank's state, the model."""

    def named(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{library}.{module}"), name)

    kind = "Bag" if pooled else ""
    policies = {
        "t0": named("modules.mc_modules", "LFU_EvictionPolicy")(),
        "t1": named("modules.mc_modules", "DistanceLFU_EvictionPolicy")(),
    }
    tables = [
        named("modules.embedding_configs", f"Embedding{kind}Config")(
            num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[f"f{number}"], init_fn=_half
        )
        for number, name in enumerate(policies)
    ]
    device = torch.device("cpu")
    modules = {
        name: named("modules.mc_modules", "MCHManagedCollisionModule")(
            zch_size=ROWS, device=device, eviction_policy=policy, eviction_interval=INTERVAL, input_hash_size=IDS
        )
        for name, policy in policies.items()
    }
    module = named("modules.mc_embedding_modules", f"ManagedCollisionEmbedding{kind}Collection")(
        named("modules.embedding_modules", f"Embedding{kind}Collection")(tables=tables, device=device),
        named("modules.mc_modules", "ManagedCollisionCollection")(modules, tables),
    )
    inner = named(
        "distributed.embeddingbag" if pooled else "distributed.embedding", f"Embedding{kind}CollectionSharder"
    )
    outer = named(
        "distributed.mc_embeddingbag" if pooled else "distributed.mc_embedding",
        f"ManagedCollisionEmbedding{kind}CollectionSharder",
    )
    enum: Any = (
        importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
        if library == "torchrec"
        else named("distributed.types.enums", "OptimType")
    )
    optimizer = enum("exact_row_wise_adagrad") if library == "torchrec" else enum.ROWWISE_ADAGRAD
    settings = {"optimizer": optimizer, "learning_rate": RATE}
    sharder = outer(inner(fused_params=settings))
    world = dist.get_world_size()
    row_wise = named("distributed.sharding_plan", "row_wise")
    plan = named("distributed.sharding_plan", "construct_module_sharding_plan")(
        module,
        {name: row_wise(compute_kernel="fused") for name in policies},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    model = named("distributed.model_parallel", "DistributedModelParallel")(
        _Model(module),
        env=named("distributed.types", "ShardingEnv").from_process_group(dist.group.WORLD),
        device=device,
        plan=named("distributed.types", "ShardingPlan")({"tables": plan}),
        sharders=[sharder],
    )
    outputs = []
    for step in range(STEPS):
        lengths, ids = ids_of_step(dist.get_rank(), step)
        features = named("sparse.jagged_tensor", "KeyedJaggedTensor")(["f0", "f1"], ids, lengths=lengths)
        found, _ = model(features)
        vectors = found.values() if pooled else torch.cat([part.values() for part in dict(found).values()])
        outputs.append(vectors.detach().clone())
        vectors.pow(2).sum().backward()
    state = {
        name: (value.local_shards()[0].tensor if hasattr(value, "local_shards") else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    return outputs, state, model


def _write(rank: int, world: int, port: int, folder: str) -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    def reset(
        tables: Any, pruned_indices: Any, pruned_indices_offsets: Any, logical_table_ids: Any, buffer_ids: Any
    ) -> None:
        for state in tables.split_optimizer_states()[int(logical_table_ids[0])]:
            state[pruned_indices] = 0

    SplitTableBatchedEmbeddingBagsCodegen.reset_embedding_weight_momentum = reset
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arrays = {}
    for pooled in (True, False):
        outputs, state, _ = train("torchrec", pooled)
        head = f"{world}/{rank}/{'pooled' if pooled else 'unpooled'}"
        arrays[f"{head}/outputs"] = torch.cat([output.reshape(-1) for output in outputs]).numpy()
        arrays |= {f"{head}/{name}": value.numpy() for name, value in state.items() if "_segments_" not in name}
    np.savez(f"{folder}/{world}.{rank}.npz", **arrays)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, world in enumerate(WORLDS):
            torch.multiprocessing.spawn(_write, (world, 29600 + number, folder), nprocs=world)
            for rank in range(world):
                arrays |= dict(np.load(f"{folder}/{world}.{rank}.npz"))
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
