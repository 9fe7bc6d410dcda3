"""Every parameter of the planner's documented constructors and functions changes the result, warns, or is an error."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import warnings
from typing import Any

import pytest
from torch import nn

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from recinfer.distributed.planner import ParameterConstraints, Topology
from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.model.constraints import PlannerError
from recinfer.distributed.planner.model.links import BasicCommsBandwidths
from recinfer.distributed.planner.model.topology import CustomTopologyData
from recinfer.distributed.planner.partitioners import GreedyPerfPartitioner
from recinfer.distributed.planner.perf_models import NoopPerfModel
from recinfer.distributed.planner.planner_base import to_sharding_plan
from recinfer.distributed.planner.planners import EmbeddingShardingPlanner
from recinfer.distributed.planner.proposers import UniformProposer
from recinfer.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from recinfer.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from recinfer.distributed.types import BoundsCheckMode, CacheParams, KeyValueParams, PipelineType
from recinfer.errors import ConfigError
from recinfer.ignored import IGNORED, IgnoredArgumentWarning
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.planner.models import model
from tests.planner.test_parts import hardware_of


def listed(of: str) -> set[str]:
    """Parameters of ``of`` that recinfer/ignored.py lists."""
    return {parameter for row in IGNORED if of in row.of for parameter in row.parameters}


def changes(base: Any, changed: Any) -> bool:
    """Whether the second call gives another result than the first, warns, or raises ConfigError."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return changed() != base() or any(one.category is IgnoredArgumentWarning for one in caught)
        except ConfigError:
            return True


# --------------------------------------------------------------------------------- wall time of shards

WALL_TIME: dict[str, tuple[Any, Any]] = {  # parameter -> a value, another one
    "shard_sizes": ([[500, 64], [501, 64]], [[1001, 32], [1001, 32]]),
    "compute_kernel": ("fused_uvm_caching", "fused"),
    "compute_device": ("cuda", "cpu"),
    "sharding_type": ("row_wise", "column_wise"),
    "batch_sizes": ([512], [1024]),
    "world_size": (4, 8),
    "local_world_size": (2, 4),
    "input_lengths": ([10.0], [11.0]),
    "input_data_type_size": (8, 4),
    "table_data_type_size": (4, 2),
    "fwd_a2a_comm_data_type_size": (4, 2),
    "bwd_a2a_comm_data_type_size": (4, 2),
    "fwd_sr_comm_data_type_size": (4, 2),
    "bwd_sr_comm_data_type_size": (4, 2),
    "num_poolings": ([1.0], [2.0]),
    "hbm_mem_bw": (1e9, 2e9),
    "ddr_mem_bw": (1e8, 2e8),
    "hbm_to_ddr_mem_bw": (1e7, 2e7),
    "intra_host_bw": (1e8, 2e8),
    "inter_host_bw": (1e6, 2e6),
    "bwd_compute_multiplier": (2.0, 3.0),
    "weighted_feature_bwd_compute_multiplier": (1.0, 2.0),
    "is_pooled": (True, False),
    "is_weighted": (True, False),
    "caching_ratio": (0.2, 0.3),
    "is_inference": (False, True),
    "prefetch_pipeline": (False, True),
    "expected_cache_fetches": (10.0, 20.0),
    "uneven_sharding_perf_multiplier": (1.0, 2.0),
    "output_data_type_size": (4, 2),
}
OTHERS = [  # calls that depend on parameters which the first one does not
    {},
    {"sharding_type": "table_wise"},
    {"sharding_type": "table_row_wise"},
    {"compute_kernel": "fused", "compute_device": "cpu"},
]


@pytest.mark.parametrize(
    "name",
    sorted(
        set(WALL_TIME) - listed("distributed.planner.shard_estimators.EmbeddingPerfEstimator.perf_func_emb_wall_time")
    ),
)
def test_wall_time(name: str) -> None:
    wall_time = EmbeddingPerfEstimator.perf_func_emb_wall_time
    assert set(inspect.signature(wall_time).parameters) == set(WALL_TIME)
    calls = [{key: values[0] for key, values in WALL_TIME.items()} | other for other in OTHERS]
    assert any(
        changes(lambda call=call: wall_time(**call), lambda call=call: wall_time(**call | {name: WALL_TIME[name][1]}))
        for call in calls
        if call[name] != WALL_TIME[name][1]
    )


# --------------------------------------------------------------------------------- topologies and constraints


TABLE = EmbeddingBagConfig(1001, 64, "t", feature_names=["f", "g"])
WEIGHTED = EmbeddingBagCollection(tables=[TABLE], device="meta", is_weighted=True)
ALONE = nn.ModuleDict(
    {"bag": nn.EmbeddingBag(1001, 64, device="meta")}
)  # only the constraints define if it is weighted


def options(
    topology: dict[str, Any], limit: ParameterConstraints | None = None, module: nn.Module = WEIGHTED
) -> list[str]:
    """Memory of the ranks, and every sharding option of a table: its shards, estimates, and plan as it is applied."""
    known = Topology(**{"world_size": 4, "local_world_size": 2, "compute_device": "cuda", **topology})
    enumerator = EmbeddingEnumerator(known, batch_size=8, constraints={"t": limit, "weight": limit} if limit else None)
    found = enumerator.enumerate(module, [EmbeddingBagCollectionSharder(), EmbeddingBagSharder()])
    text = [str(device.storage) for device in known.devices]
    for option in found:
        for rank, shard in zip(itertools.cycle(range(known.world_size)), option.shards):
            shard.rank = rank
        text += [str(option), repr([(shard.perf, shard.storage) for shard in option.shards])]
        text += [repr((option.dependency, option.feature_names)), repr(to_sharding_plan([option], known).plan)]
    if known.hardware is not None:
        lookup = plan_inference(model([(1000, 64)]), world_size=1, compute_device="cpu", hardware=known.hardware)
        text.append(lookup.to_json())
    return text


TOPOLOGY: dict[str, Any] = {
    "world_size": 8,
    "compute_device": "mtia",
    "hbm_cap": 1 << 34,
    "ddr_cap": 1 << 34,
    "ssd_cap": 1 << 40,
    "local_world_size": 4,
    "pod_size": 4,
    "hbm_mem_bw": 1e9,
    "ddr_mem_bw": 1e9,
    "ssd_mem_bw": 1e6,
    "hbm_to_ddr_mem_bw": 1e9,
    "intra_host_bw": 1e9,
    "inter_host_bw": 1e9,
    "bwd_compute_multiplier": 3.0,
    "custom_topology_data": CustomTopologyData({"hbm_cap": [1, 2, 3, 4]}, 4),
    "weighted_feature_bwd_compute_multiplier": 3.0,
    "uneven_sharding_perf_multiplier": 3.0,
    "generalized_comms_bandwidths": BasicCommsBandwidths(1.0, 2.0),
    "hardware": hardware_of(1.0, 2.0),
}


@pytest.mark.parametrize("name", sorted(TOPOLOGY))
def test_topology(name: str) -> None:
    assert set(inspect.signature(Topology).parameters) == set(TOPOLOGY)
    assert any(
        changes(lambda on=on: options(on), lambda on=on: options({**on, name: TOPOLOGY[name]}))
        for on in ({}, {"compute_device": "cpu"})
    )


CONSTRAINTS: dict[str, Any] = {
    "sharding_types": ["row_wise"],
    "compute_kernels": ["fused_uvm"],
    "min_partition": 16,
    "pooling_factors": [3.0],
    "num_poolings": [3.0],
    "batch_sizes": [3],
    "is_weighted": True,
    "cache_params": CacheParams(load_factor=0.5),
    "enforce_hbm": True,
    "stochastic_rounding": False,
    "bounds_check_mode": BoundsCheckMode.IGNORE,
    "feature_names": ["f"],
    "output_dtype": DataType.FP16,
    "device_group": "cpu",
    "colocate_with": "others",
}


@pytest.mark.parametrize("name", [*CONSTRAINTS, "key_value_params", "use_virtual_table"])
def test_constraints(name: str) -> None:
    assert {field.name for field in dataclasses.fields(ParameterConstraints)} == {
        *CONSTRAINTS, "key_value_params", "use_virtual_table"
    }  # fmt: skip
    if name == "key_value_params":
        with pytest.warns(IgnoredArgumentWarning):
            ParameterConstraints(key_value_params=KeyValueParams(l2_cache_size=1))
        return
    module = ALONE if name == "is_weighted" else WEIGHTED
    given = {name: CONSTRAINTS.get(name, True)}
    assert changes(
        lambda: options({}, ParameterConstraints(), module),
        lambda: options({}, ParameterConstraints(**given), module),
    )


# --------------------------------------------------------------------------------- estimators, enumerator, planner


def known(**given: Any) -> Topology:
    return Topology(**{"world_size": 4, "local_world_size": 2, "compute_device": "cuda", **given})


def estimated(make: Any, **given: Any) -> list[str]:
    """What an estimator fills into the shards of every option."""
    enumerator = EmbeddingEnumerator(known(), batch_size=8)
    found = enumerator.enumerate(WEIGHTED, [EmbeddingBagCollectionSharder()])
    make(**{"topology": known(), **given}).estimate(found, enumerator.sharder_map)
    return [repr([(shard.perf, shard.storage) for shard in option.shards]) for option in found]


LIMITS = {"t": ParameterConstraints(batch_sizes=[3, 3])}  # figures that options have win
OF_ESTIMATORS: list[tuple[Any, str, Any]] = [
    (EmbeddingPerfEstimator, "topology", known(hbm_mem_bw=1e6)),
    (EmbeddingPerfEstimator, "constraints", LIMITS),
    (EmbeddingPerfEstimator, "is_inference", True),
    (EmbeddingStorageEstimator, "topology", known(world_size=8)),
    (EmbeddingStorageEstimator, "constraints", LIMITS),
    (EmbeddingStorageEstimator, "pipeline_type", PipelineType.TRAIN_SPARSE_DIST),
    (EmbeddingStorageEstimator, "is_inference", True),
]


@pytest.mark.parametrize(("kind", "name", "value"), OF_ESTIMATORS)
def test_estimators(kind: Any, name: str, value: Any) -> None:
    tried = {name for one, name, _ in OF_ESTIMATORS if one is kind} | {"run_embedding_at_peak_memory"}
    assert set(inspect.signature(kind).parameters) <= tried
    assert changes(lambda: estimated(kind), lambda: estimated(kind, **{name: value}))


def test_outputs_at_peak_memory_are_counted() -> None:
    """Pipelines without stages count them in any case."""
    staged = {"pipeline_type": PipelineType.TRAIN_SPARSE_DIST}
    without = estimated(EmbeddingStorageEstimator, **staged)
    assert estimated(EmbeddingStorageEstimator, **staged, run_embedding_at_peak_memory=True) != without


def planned(**given: Any) -> str:
    """The plan, or the error, and what the planner reports of its parts."""
    given = {"topology": known(), **given}
    planner = EmbeddingShardingPlanner(**given)
    try:
        plan = planner.plan(WEIGHTED, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        return str(error)
    report = planner.report
    stated = None if report is None else (report.num_proposals, report.num_plans)
    return repr((plan.plan, stated, given["topology"].world_size))


class NoOptions(EmbeddingEnumerator):
    def space(self, *args: Any) -> None:
        return None

    def enumerate(self, module: Any, sharders: Any) -> list[Any]:
        return super().enumerate(module, sharders)[:1]


PLANNER: dict[str, Any] = {
    "topology": known(world_size=2),
    "batch_size": 1 << 30,
    "enumerator": NoOptions(known()),
    "storage_reservation": FixedPercentageStorageReservation(1.0),
    "proposer": UniformProposer(),
    "partitioner": GreedyPerfPartitioner(),
    "performance_model": NoopPerfModel(known()),
    "constraints": {"t": ParameterConstraints(sharding_types=["row_wise"])},
    "callbacks": [lambda options: []],
}


@pytest.mark.parametrize("name", sorted(PLANNER))
def test_planner(name: str) -> None:
    others = {
        "stats",
        "debug",
        "timeout_seconds",
        "plan_loader",
        "pinned",
    }  # test_planner.py and test_edges.py have these
    assert set(inspect.signature(EmbeddingShardingPlanner).parameters) == {*PLANNER, *others}
    assert changes(planned, lambda: planned(**{name: PLANNER[name]}))
