"""TorchRec's planner tutorial with the package's name replaced: ``python examples/tutorial_planner.py``.

It plans for GPUs that this machine need not have: planning needs no GPU and no memory for the tables.
"""

from __future__ import annotations

import logging
import sys

import torch

import recinfer
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.types import ShardingType

# A notebook shows logs by itself.
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)

small_table = recinfer.EmbeddingBagConfig(
    name="small_table",
    embedding_dim=64,
    num_embeddings=10000000,
    feature_names=["small_table_feature"],
    pooling=recinfer.PoolingType.SUM,
)

huge_table = recinfer.EmbeddingBagConfig(
    name="huge_table",
    embedding_dim=1024,
    num_embeddings=50000000,
    feature_names=["large_table_feature"],
    pooling=recinfer.PoolingType.SUM,
)

# A small table on one GPU: table-wise.
small_toy_model = recinfer.EmbeddingBagCollection(device=torch.device("meta"), tables=[small_table])
topology_1gpu = Topology(world_size=1, compute_device="cuda")
planner = EmbeddingShardingPlanner(topology=topology_1gpu, debug=True)
sharding_plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

# On two: row-wise, half of the memory each.
topology_2gpu = Topology(world_size=2, compute_device="cuda")
planner = EmbeddingShardingPlanner(topology=topology_2gpu, debug=True)
sharding_plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

# Plan with table-wise only, for comparison.
constraints = {"small_table": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])}
planner = EmbeddingShardingPlanner(topology=topology_2gpu, constraints=constraints, debug=True)
plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

# The cost of bags of 200 ids.
constraints = {"small_table": ParameterConstraints(pooling_factors=[200.0])}
planner = EmbeddingShardingPlanner(topology=topology_2gpu, constraints=constraints, debug=True)
plan = planner.plan(small_toy_model, sharders=[EmbeddingBagCollectionSharder()])

# A table that no GPU can hold: column-wise, in host memory behind a cache.
huge_toy_model = recinfer.EmbeddingBagCollection(device=torch.device("meta"), tables=[huge_table])
planner = EmbeddingShardingPlanner(topology=topology_2gpu, debug=True)
sharding_plan = planner.plan(huge_toy_model, sharders=[EmbeddingBagCollectionSharder()])
