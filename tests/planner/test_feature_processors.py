"""Plans of feature-processed collections: cut by rows where constraints ask for it, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recinfer.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from recinfer.distributed.planner.stats import NoopEmbeddingStats
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

ALL = {"data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard"}
BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


def model(rows: int = 64) -> nn.Sequential:
    """Position weights of 1, 2, 3 ..., rows of 0, 1, 2 ..."""
    config = EmbeddingBagConfig(rows, 256, "t", feature_names=["f"])
    bags = EmbeddingBagCollection([config], is_weighted=True)
    processors = PositionWeightedModuleCollection({"f": 4})
    with torch.no_grad():
        next(bags.parameters()).copy_(torch.arange(float(rows)).unsqueeze(1).expand(rows, 256))
        for weights in processors.parameters():
            weights.copy_(torch.arange(1.0, 5.0))
    return nn.Sequential(FeatureProcessedEmbeddingBagCollection(bags, processors))


def planned(module: nn.Module, device: str, world: int, local: int, kinds: list[str] | None) -> Any:
    limits = {"t": ParameterConstraints(sharding_types=kinds)}
    topology = Topology(world, device, local_world_size=local)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=limits, stats=NoopEmbeddingStats())
    sharders: Any = [
        FeatureProcessedEmbeddingBagCollectionSharder(fused_params={"optimizer": "SGD", "learning_rate": 1.0})
    ]
    return planner.plan(module, sharders), sharders


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", sorted(ALL))
def test_every_sharding_type_is_planned_where_constraints_ask_for_it(kind: str, device: str) -> None:
    plan, _ = planned(model(), device, 4, 2, [kind])
    module = plan.get_plan_for_module("0")
    assert isinstance(module, EmbeddingModuleShardingPlan) and module["t"].sharding_type == kind


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuts_by_rows_are_not_tried_unasked(device: str) -> None:
    planner = EmbeddingShardingPlanner(topology=Topology(2, device), stats=NoopEmbeddingStats())
    sharders: Any = [FeatureProcessedEmbeddingBagCollectionSharder()]
    options = planner._enumerator.enumerate(model(), sharders)
    assert {option.sharding_type for option in options} == ALL - set(BY_ROWS)


def lookup(rank: int, world: int, kind: str) -> list[float]:
    module = model()
    plan, sharders = planned(module, "cpu", world, 2, [kind])
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    dmp = DistributedModelParallel(module, env, torch.device("cpu"), plan, sharders)
    # Bags of each rank: two ids in different halves of the table, and none.
    features = KeyedJaggedTensor(["f"], torch.tensor([3 + rank, 60]), lengths=torch.tensor([2, 0]))
    found = []
    for _ in range(2):
        pooled = dmp(features).values()
        found += pooled[:, 0].tolist()
        pooled[:, 0].sum().backward()
    return found


@pytest.mark.parametrize("kind", BY_ROWS)
def test_and_they_train(kind: str) -> None:
    for rank, found in enumerate(run_ranks(2, lookup, kind, env={"LOCAL_WORLD_SIZE": "2"})):
        first = (3 + rank) * 1 + 60 * 2
        assert found[:2] == [first, 0.0]
        # Each rank's gradient counts half. Row 3 + rank moved by its weight, 1; row 60 by 2 from each of two ranks.
        second = (3 + rank - 0.5) * 1 + (60 - 2.0) * 2
        assert found[2:] == [second, 0.0]
