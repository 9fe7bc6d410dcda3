"""Ranks of unequal memory: row-wise tables are cut in proportion to it, and what they answer stays the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from recinfer.distributed.planner import ParameterConstraints, PlannerError, Topology, plan_inference
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from tests.planner.models import GB, assert_within_capacity, collection, model, sharders, train_planner
from tests.quant.cases import float_bags, random_features

CAPS = [80 * GB, 80 * GB, 16 * GB, 16 * GB]


def test_a_table_larger_than_equal_pieces_would_hold() -> None:
    topology = Topology(4, "cuda", hbm_cap=CAPS, ddr_cap=0)
    plan = plan_inference(
        model([(280_000_000, 128)]),
        world_size=4,
        compute_device="cuda",
        precision=DataType.FP32,
        topology=topology,
    )
    assert_within_capacity(plan)
    heights = [shard.rows for shard in plan.tables[0].shards]
    np.testing.assert_allclose(heights, [280e6 * cap / sum(CAPS) for cap in CAPS], atol=1)
    planner = train_planner(4, topology=topology)
    planner.plan(collection([(280_000_000, 128)]), sharders())
    assert planner.last_plan is not None and [s.rows for s in planner.last_plan.tables[0].shards] == heights


def test_larger_pieces_cost_more() -> None:
    limits = {"t0": ParameterConstraints(sharding_types=["row_wise"])}

    def loads(caps: list[int]) -> list[float]:
        topology = Topology(4, "cpu", ddr_cap=caps)
        return plan_inference(
            model([(100_000, 64)]), world_size=4, topology=topology, constraints=limits
        ).estimates["perf_ms_per_rank"]  # fmt: skip

    equal, unequal = loads([GB] * 4), loads([3 * GB, GB, GB, GB])
    assert len(set(equal)) == 1
    assert unequal[0] > equal[0] > unequal[1] == pytest.approx(unequal[3], rel=1e-3)


def test_the_advice_is_for_pieces_of_equal_ranks() -> None:
    limits = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    topology = Topology(4, "cpu", ddr_cap=[90 << 20, 90 << 20, 16 << 20, 16 << 20])
    with pytest.raises(PlannerError, match=r"What would help: 6\d\.\d+ MiB \(\d+ bytes\) of ddr per rank"):
        plan_inference(model([(4_000_000, 64)]), world_size=4, topology=topology, constraints=limits)


def test_unequal_pieces_answer_as_the_whole_table_does() -> None:
    module = EmbeddingBagCollection.from_float(float_bags([PoolingType.SUM, PoolingType.MEAN] * 2), DataType.INT8)
    limits = {c.name: ParameterConstraints(sharding_types=["row_wise"]) for c in module.embedding_bag_configs()}
    topology = Topology(3, "cpu", ddr_cap=[5 << 20, 2 << 20, 1 << 20])
    holder = nn.ModuleDict({"ebc": module})
    plan = plan_inference(holder, world_size=3, topology=topology, constraints=limits)
    assert any(len({s.rows for s in table.shards}) == 3 for table in plan.tables)
    of_module = plan.to_sharding_plan().get_plan_for_module("ebc")
    assert isinstance(of_module, EmbeddingModuleShardingPlan)
    features = random_features(module.embedding_bag_configs(), 17, seed=3)
    want = module(features).values()
    for fused in (True, False):
        sharded = ShardedQuantEmbeddingBagCollection(module, of_module, ShardingEnv.from_local(3, 0), fused=fused)
        torch.testing.assert_close(sharded(features).values(), want, rtol=1e-5, atol=1e-5)
