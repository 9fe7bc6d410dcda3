"""Meta models and shorthands for the planner's tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import EmbeddingShardingPlanner, Plan, Topology
from recinfer.distributed.planner.solve.problem import Problem
from recinfer.distributed.planner.stats import NoopEmbeddingStats
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection

GB = 1024**3


def collection(shapes: Sequence[tuple[int, int]]) -> EmbeddingBagCollection:
    """Tables t0, t1, ... of (rows, dim) on meta."""
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"])
        for i, (rows, dim) in enumerate(shapes)
    ]
    return EmbeddingBagCollection(tables=tables, device="meta")


def model(shapes: Sequence[tuple[int, int]]) -> torch.nn.Module:
    """The same as ``sparse.ebc`` of a larger model with a dense part."""
    sparse = torch.nn.ModuleDict({"ebc": collection(shapes)})
    return torch.nn.ModuleDict({"sparse": sparse, "over": torch.nn.Linear(8, 1)})


def train_planner(world_size: int, **kwargs: object) -> EmbeddingShardingPlanner:
    """A silent planner for GPUs."""
    topology = kwargs.pop("topology", None) or Topology(world_size=world_size, compute_device="cuda")
    return EmbeddingShardingPlanner(topology=topology, stats=NoopEmbeddingStats(), **kwargs)  # type: ignore[arg-type]


def sharders() -> list:
    """The float sharder."""
    return [EmbeddingBagCollectionSharder()]


def assert_within_capacity(plan: Plan) -> None:
    """No rank holds more than it has."""
    e = plan.estimates
    for memory in ("hbm", "ddr"):
        used, cap = e[f"{memory}_bytes_per_rank"], e[f"{memory}_cap_per_rank"]
        assert all(u <= c for u, c in zip(used, cap)), (memory, used, cap)


def best_by_force(problem: Problem) -> float:
    """The optimum by trying every option and every rank; tiny problems without host options only."""
    best = np.inf
    options = [range(problem.unit_ptr[u], problem.unit_ptr[u + 1]) for u in range(problem.num_units)]
    for choice in itertools.product(*options):
        shards = [s for o in choice for s in range(problem.shard_ptr[o], problem.shard_ptr[o + 1])]
        places = [
            [int(problem.fixed_rank[s])] if problem.fixed_rank[s] >= 0 else range(problem.world_size) for s in shards
        ]
        for ranks in itertools.product(*places):
            load, used = np.zeros(problem.world_size), np.zeros(problem.caps.shape)
            for s, r in zip(shards, ranks):
                load[r] += problem.perf[s]
                used[:, r] += problem.bytes[:, s]
            if (used <= problem.caps).all():
                best = min(best, load.max())
    return float(best)
