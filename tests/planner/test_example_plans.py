"""The plans of the examples are pinned by their hashes, so that no rectangle moves unintentionally."""

from __future__ import annotations

import runpy

import pytest

from recinfer.distributed.planner import EmbeddingShardingPlanner, plan_inference
from recinfer.distributed.types import ShardingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.planner.models import model, sharders, train_planner
from tests.planner.test_tutorials import EXAMPLES


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("table_wise", "0409a603e3d2cbc9"),
        ("row_wise", "237ad336f577c403"),
        ("column_wise", "d8e692885be5e55c"),
        ("data_parallel", "6da883ec0b640f17"),
    ],
)
def test_plans_of_the_sharding_tutorial(kind: str, expected: str) -> None:
    example = runpy.run_path(str(EXAMPLES / "tutorial_sharding.py"))
    tables = EmbeddingBagCollection(tables=example["large_tables"] + example["small_tables"], device="meta")
    planner: EmbeddingShardingPlanner = train_planner(2, constraints=example["gen_constraints"](ShardingType(kind)))
    planner.plan(tables, sharders())
    assert planner.last_plan is not None
    assert planner.last_plan.hash[:16] == expected


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, "d7054e08725dab24"), (2, "2ca08bf6a20268a1"), (4, "4c7f7accc640207a")]
)
def test_plans_to_serve(ranks: int, expected: str) -> None:
    """As docs/how-to/ plans, with tables that fit one rank of four only when they are cut."""
    shapes = [(3_000_000, 64), (500_000, 128), (100_000, 16), (40, 8)]
    assert plan_inference(model(shapes), world_size=ranks, ddr_gb=1.2 / ranks).hash[:16] == expected
