"""Every name that TorchRec documents under ``torchrec.distributed`` is here, at its place, with its parameters and members.

``documented_api.json`` is the list, by our names: parameters in order (``*args`` for any), members of classes with the
parameters of methods (null for attributes). More parameters and members than documented are fine.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.sources import walk

TESTS = Path(__file__).parent
DOCUMENTED: dict[str, dict[str, Any]] = json.loads((TESTS / "documented_api.json").read_text())


def parameters(function: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]


def check_parameters(what: str, function: Any, documented: list[str]) -> None:
    """The documented ones, by name and in this order, among what the function takes."""
    wanted = [name for name in documented if not name.startswith("*")]
    if not wanted:
        return
    taken = parameters(function)
    names = [p.name for p in taken]
    found = [name for name in names if name in wanted]
    assert found == wanted, f"{what}: documented {wanted}; it takes {names}"
    for parameter in taken:
        extra = parameter.name not in wanted and parameter.default is inspect.Parameter.empty
        variable = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        assert variable or not extra, f"{what}: needs {parameter.name}, which is not documented"


def member(cls: type, name: str) -> Any:
    """A class's member, or None for one that only instances have (and the class declares)."""
    if hasattr(cls, name):
        return inspect.getattr_static(cls, name)
    declared = any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__)
    assert declared, f"{cls.__name__} has no member {name}"
    return None


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_name(name: str) -> None:
    module, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(module), short)
    entry = DOCUMENTED[name]
    assert found.__doc__, f"{name} has no docstring"
    if not (inspect.isclass(found) and issubclass(found, Enum)):
        check_parameters(name, found, entry["params"])
    for member_name, documented in entry.get("members", {}).items():
        function = member(found, member_name)
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if documented is not None and callable(function):
            check_parameters(f"{name}.{member_name}", function, documented)


# Names that no test calls directly, with the test that runs each through another name and checks the result.
COLLECTIVES = "distributed/test_comm_ops.py::test_requests_and_waits_by_hand"
BY_HAND = "distributed/test_vocabulary.py::test_a_sharded_collection_and_a_sharded_bag_step_by_step"
STAGES = "distributed/test_train_pipeline.py::test_the_stages_of_the_sparse_pipeline"
PIPELINES = "distributed/test_train_pipeline.py::test_every_pipeline_trains_as_the_plain_loop"
GROUP = "distributed/test_vocabulary.py::test_features_and_columns_of_a_group"
RUN_BY = {
    **{
        f"recinfer.distributed.comm_ops.{op}_{step}": COLLECTIVES
        for op, steps in {
            "All2All_Pooled": ("Req", "Wait"),
            "All2All_Seq": ("Req", "Req_Wait"),
            "All2Allv": ("Req", "Wait"),
            "AllGatherBase": ("Req", "Wait"),
            "ReduceScatterBase": ("Req", "Wait"),
            "ReduceScatterV": ("Req", "Wait"),
            "ReduceScatter": ("Req", "Wait"),
            "Variable_Batch_All2All_Pooled": ("Req", "Wait"),
        }.items()
        for step in steps
    },
    "recinfer.distributed.dist_data.KJTAllToAllSplitsAwaitable": "distributed/test_dist_kjt.py::test_every_rank_gets_its_keys",
    "recinfer.distributed.dist_data.KJTAllToAllTensorsAwaitable": "distributed/test_dist_kjt.py::test_every_rank_gets_its_keys",
    "recinfer.distributed.embedding.EmbeddingCollectionAwaitable": BY_HAND,
    "recinfer.distributed.embedding.EmbeddingCollectionContext": BY_HAND,
    "recinfer.distributed.embedding.ShardedEmbeddingCollection": BY_HAND,
    "recinfer.distributed.embedding_types.ShardedEmbeddingModule": BY_HAND,
    "recinfer.distributed.embeddingbag.EmbeddingAwaitable": BY_HAND,
    "recinfer.distributed.embeddingbag.EmbeddingBagCollectionAwaitable": BY_HAND,
    "recinfer.distributed.embeddingbag.ShardedEmbeddingBag": BY_HAND,
    "recinfer.distributed.embedding_lookup.InferGroupedLookupMixin": (
        "distributed/test_infer_lookup.py::test_packed_rows_are_state_and_nothing_trains"
    ),
    "recinfer.distributed.embedding_sharding.KJTListAwaitable": "distributed/test_sharding.py::test_lists_of_lists",
    "recinfer.distributed.embedding_sharding.ListOfKJTListAwaitable": "distributed/test_sharding.py::test_lists_of_lists",
    "recinfer.distributed.embedding_types.ListOfKJTList": "distributed/test_sharding.py::test_lists_of_lists",
    "recinfer.distributed.embedding_sharding.KJTSplitsAllToAllMeta": (
        "distributed/test_train_pipeline.py::test_an_exchange_can_be_described_before_it_begins"
    ),
    "recinfer.distributed.train_pipeline.KJTSplitsAllToAllMeta": (
        "distributed/test_train_pipeline.py::test_an_exchange_can_be_described_before_it_begins"
    ),
    "recinfer.distributed.embedding_types.BaseEmbeddingSharder": (
        "distributed/test_documented_members.py::test_sharders_count_bytes_and_offer_types"
    ),
    "recinfer.distributed.embedding_types.BaseQuantEmbeddingSharder": (
        "distributed/test_documented_members.py::test_sharders_count_bytes_and_offer_types"
    ),
    "recinfer.distributed.embedding_types.EmbeddingAttributes": GROUP,
    "recinfer.distributed.embedding_types.FeatureShardingMixIn": (
        "distributed/test_documented_members.py::test_a_sharding_of_the_users_own"
    ),
    "recinfer.distributed.embedding_types.ShardedConfig": GROUP,
    "recinfer.distributed.embedding_types.ShardedMetaConfig": GROUP,
    "recinfer.distributed.train_pipeline.BaseForward": STAGES,
    "recinfer.distributed.train_pipeline.PipelinedForward": STAGES,
    "recinfer.distributed.train_pipeline.TrainPipelineContext": STAGES,
    "recinfer.distributed.train_pipeline.PrefetchPipelinedForward": PIPELINES,
    "recinfer.distributed.train_pipeline.PrefetchTrainPipelineSparseDist": PIPELINES,
    "recinfer.distributed.types.ModuleShardingPlan": (
        "distributed/test_documented_members.py::test_a_plan_prints_its_parameters_and_shards"
    ),
}


def name_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@functools.cache
def used_in_tests() -> frozenset[str | None]:
    """Names that tests call, derive from or take members of, not only import or compare types with."""
    used: set[str | None] = set()
    for path in TESTS.rglob("*.py"):
        for node in walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                used.add(name_of(node.func))
            elif isinstance(node, ast.ClassDef):
                used.update(name_of(base) for base in node.bases)
            elif isinstance(node, ast.Attribute):
                used.add(name_of(node.value))
    return frozenset(used)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_name_is_exercised(name: str) -> None:
    """A test uses it, or a named test runs it through something else."""
    short = name.rpartition(".")[2]
    if name not in RUN_BY:
        assert short in used_in_tests(), (
            f"no test calls {name} or derives from it; write one, or name in RUN_BY what runs it"
        )
        return
    path, _, test = RUN_BY[name].partition("::")
    source = (TESTS / path).read_text()
    assert re.search(rf"def {test}\b", source), f"{name}: there is no {RUN_BY[name]}"
    assert re.search(rf"\b{short}\b", source), f"{name}: {path} does not speak of it"


def test_the_list_is_whole() -> None:
    assert len(DOCUMENTED) == 169
