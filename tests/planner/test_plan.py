"""The plan as data: JSON both ways, the hash, diffs, checks against a model and a topology."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recinfer.distributed.planner import ParameterConstraints, Plan, ShardRect, TablePlan, Topology, plan_inference
from recinfer.errors import ConfigError, NotFoundError
from recinfer.modules.embedding_configs import DataType
from tests.planner.models import model

SHAPES = [(1000, 64), (50, 32), (7, 12)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    limits = {
        "t0": ParameterConstraints(sharding_types=["row_wise"]),
        "t1": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
    }
    return plan_inference(model(SHAPES), world_size=2, constraints=limits)


def entry(
    shards: list[ShardRect], kind: str = "row_wise", precision: DataType = DataType.INT8, dim: int = 8
) -> TablePlan:
    return TablePlan("m", "t", kind, "quant", precision, 10, dim, tuple(shards))


def test_json_gives_the_same_plan_and_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.estimates == plan.estimates
    assert again.to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(NotFoundError):
        Plan.load(tmp_path / "none.json")


def test_hash_is_of_the_placement_alone(plan: Plan) -> None:
    assert replace(plan, estimates={}).hash == plan.hash
    moved = replace(plan.tables[2], shards=tuple(replace(s, rank=1 - s.rank) for s in plan.tables[2].shards))
    assert replace(plan, tables=(*plan.tables[:2], moved)).hash != plan.hash


def test_an_edited_plan_is_refused_until_its_hash_goes(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    data["tables"][2]["compute_kernel"] = "quant_uvm"
    with pytest.raises(ConfigError, match="was changed after"):
        Plan.from_json(json.dumps(data))
    del data["hash"]
    assert Plan.from_json(json.dumps(data)).tables[2].compute_kernel == "quant_uvm"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "recinfer.plan/9"}', '{"format": "recinfer.plan/1", "world_size": 1}'],
)
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([ShardRect(0, 0, 5, 0, 8)], "no shard holds rows 5 to 10"),
        ([ShardRect(0, 0, 5, 0, 8), ShardRect(1, 6, 10, 0, 8)], "begin at row 5"),
        ([ShardRect(0, 0, 6, 0, 8), ShardRect(1, 5, 10, 0, 8)], "begin at row 6"),
        ([ShardRect(0, 0, 10, 0, 4)], "no shard holds columns 4 to 8"),
        ([ShardRect(0, 0, 10, 0, 4), ShardRect(0, 0, 10, 5, 8)], "begin at row 0, column 4"),
        ([], "no shard holds columns 0 to 8"),
        ([ShardRect(-1, 0, 10, 0, 8)], "is on rank -1"),
    ],
)
def test_shards_must_tile_the_table(shards: list[ShardRect], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entry(shards)


def test_replicas_are_whole_and_one_a_rank() -> None:
    entry([ShardRect(0, 0, 10, 0, 8), ShardRect(1, 0, 10, 0, 8)], "data_parallel")
    for ranks, message in (((1, 1), "one per rank"), ((0, -1), "is on rank -1")):
        with pytest.raises(ConfigError, match=message):
            entry([ShardRect(rank, 0, 10, 0, 8) for rank in ranks], "data_parallel")


def test_shards_are_of_their_table() -> None:
    assert [s.table for s in entry([ShardRect(0, 0, 10, 0, 8)]).shards] == ["t"]
    with pytest.raises(ConfigError, match=r"shards of other tables: \['u'\]"):
        entry([ShardRect(0, 0, 10, 0, 8, "u")])


def test_small_precisions_are_cut_at_whole_bytes() -> None:
    cut = [ShardRect(0, 0, 10, 0, 6), ShardRect(1, 0, 10, 6, 8)]
    entry(cut, "column_wise")
    for precision in (DataType.INT4, DataType.INT2):
        with pytest.raises(ConfigError, match="multiple of 4"):
            entry(cut, "column_wise", precision)


def test_ranks_must_be_in_the_world_and_tables_planned_once(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="outside 1 ranks"):
        replace(plan, world_size=1, local_world_size=1)
    with pytest.raises(ConfigError, match="planned twice"):
        replace(plan, tables=(plan.tables[0], plan.tables[0]))


def test_sharding_plan_and_back(plan: Plan) -> None:
    objects = plan.to_sharding_plan()
    assert [str(s.placement) for s in objects.plan["sparse.ebc"]["t0"].sharding_spec.shards] == [
        "rank:0/cpu",
        "rank:1/cpu",
    ]
    again = Plan.from_sharding_plan(objects, model(SHAPES), 2, "cpu", DataType.INT8)
    assert again.hash == plan.hash


def test_check_model_names_what_differs(plan: Plan) -> None:
    plan.check_model(model(SHAPES))
    with pytest.raises(ConfigError, match=r"sparse\.ebc\.t2 is 9 x 12 in the model, 7 x 12 in the plan"):
        plan.check_model(model([*SHAPES[:2], (9, 12)]))
    with pytest.raises(ConfigError, match=r"sparse\.ebc\.t3 of the model is not planned"):
        plan.check_model(model([*SHAPES, (9, 12)]))


def test_check_topology_names_world_and_memory(plan: Plan) -> None:
    plan.check_topology(Topology(2, "cpu"))
    with pytest.raises(ConfigError, match="world_size is 2 in the plan, 3 in the topology"):
        plan.check_topology(Topology(3, "cpu"))
    with pytest.raises(ConfigError, match="bytes of ddr"):
        plan.check_topology(Topology(2, "cpu", ddr_cap=1000))


def test_diff_lists_what_changed(plan: Plan) -> None:
    assert plan.diff(plan) == []
    other = plan_inference(model([*SHAPES[:2], (8, 12)]), world_size=2)
    changes = {(c.table, c.what) for c in plan.diff(other)}
    assert ("sparse.ebc.t0", "sharding_type") in changes and ("sparse.ebc.t2", "num_embeddings") in changes
    shorter = replace(plan, tables=plan.tables[:2])
    assert [(c.table, c.what) for c in plan.diff(shorter)] == [("sparse.ebc.t2", "removed")]
    assert [(c.table, c.what) for c in shorter.diff(plan)] == [("sparse.ebc.t2", "added")]


def test_table_is_found_by_module_and_name(plan: Plan) -> None:
    assert plan.table("sparse.ebc", "t1").embedding_dim == 32
    with pytest.raises(NotFoundError):
        plan.table("sparse.ebc", "t9")


def test_a_plan_of_other_types_is_refused(plan: Plan) -> None:
    """No value is read as another type: what a plan says is what its file says."""
    data = {key: value for key, value in json.loads(plan.to_json()).items() if key != "hash"}
    for key, value in {"world_size": "2", "local_world_size": 2.0, "compute_device": 1, "estimates": []}.items():
        with pytest.raises(ConfigError, match=rf"plan\.{key}: got .*; expected"):
            Plan.from_json(json.dumps({**data, key: value}))
    first = data["tables"][0]
    for key, value in {"module": 1, "num_embeddings": True, "shards": [[0, 0, 1000, 0, "64"]], "precision": []}.items():
        with pytest.raises(ConfigError, match=rf"plan\.tables\[0\]\.{key}.*: got .*; expected"):
            Plan.from_json(json.dumps({**data, "tables": [{**first, key: value}, *data["tables"][1:]]}))
