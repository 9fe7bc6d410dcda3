"""Inputs that TorchRec's planner accepts (nothing to shard, odd sizes), errors when nothing fits, the plan's hash."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Plan, Topology
from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.model.hardware import PROFILE_FORMAT, HardwareProfile
from recinfer.distributed.planner.proposers import DynamicProgrammingProposer, GreedyProposer
from recinfer.distributed.planner.types import (
    CollectiveType,
    Enumerator,
    GeneralizedCommsBandwidth,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
)
from recinfer.distributed.sharding_plan import get_default_sharders
from recinfer.distributed.types import CacheParams
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.distributed.spawn import run_ranks

MIB = 1 << 20


def model(rows: list[int], num_features: int = 1, dim: int = 4) -> nn.Module:
    holder = nn.Module()
    holder.ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(r, dim, f"t{i}", feature_names=[f"f{i}_{k}" for k in range(num_features)])
            for i, r in enumerate(rows)
        ],
        device=torch.device("meta"),
    )
    return holder


def planner(topology: Topology | None = None, **kwargs: Any) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(topology=topology or Topology(2, "cpu"), debug=False, **kwargs)


# ------------------------------------------------------------------------------------------------- nothing to shard


@pytest.mark.parametrize("kwargs", [{}, {"proposer": GreedyProposer()}])
@pytest.mark.parametrize("of", ["no tables", "no sharders", "empty collection", "another device"])
def test_nothing_to_shard_is_an_empty_plan(of: str, kwargs: dict[str, Any]) -> None:
    sharders: Any = [] if of == "no sharders" else get_default_sharders()
    module = {"no tables": nn.Linear(2, 2), "empty collection": model([])}.get(of, model([8]))
    if of == "another device":
        kwargs = {**kwargs, "constraints": {"t0": ParameterConstraints(device_group="cuda")}}
    made = planner(**kwargs)
    assert made.plan(module, sharders).plan == {}
    assert made.report is None and made.last_plan is None


def without_tables(rank: int, world_size: int) -> tuple[list[str], bool]:
    torch.manual_seed(rank)
    dmp = DistributedModelParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    bags = nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])]))
    replicated = DistributedModelParallel(bags, sharders=[])
    assert not dmp.plan.plan and not replicated.plan.plan and not dmp.fused_optimizer.params
    dmp(torch.ones(1, 2) + rank).sum().backward()
    weight = dict(dmp.named_parameters())["0.weight"]
    found = [torch.empty_like(weight) for _ in range(world_size)]
    dist.all_gather(found, weight.grad)
    return [n for n, _ in replicated.named_parameters()], torch.equal(*found)


def test_a_model_without_tables_is_replicated() -> None:
    assert run_ranks(2, without_tables) == [(["0.embedding_bags.t.weight"], True)] * 2


# ------------------------------------------------------------------------------------------------- odd sizes


def test_a_host_has_no_more_ranks_than_there_are() -> None:
    topology = Topology(2, "cuda", local_world_size=8)
    assert (topology.world_size, topology.local_world_size) == (2, 2)
    limits = {"t0": ParameterConstraints(sharding_types=["table_row_wise"])}
    sharders: Any = get_default_sharders()
    made: Any = planner(topology, constraints=limits).plan(model([8]), sharders)
    assert made.plan["ebc"]["t0"].ranks == [0, 1]
    with pytest.raises(ConfigError, match="local_world_size 4 must divide world_size 6"):
        Topology(6, "cuda", local_world_size=4)


def test_more_pooling_factors_than_features_count_all() -> None:
    sharders: Any = get_default_sharders()

    def option(factors: list[float], num_features: int) -> ShardingOption:
        limit = ParameterConstraints(
            pooling_factors=factors, sharding_types=["table_wise"], compute_kernels=["fused"], batch_sizes=None
        )
        enumerator = EmbeddingEnumerator(Topology(2, "cuda"), constraints={"t0": limit})
        (found,) = enumerator.enumerate(model([100], num_features), sharders)
        return found

    long, right = option([1.0, 2.0, 3.0], 1), option([1.0, 2.0, 3.0], 3)
    assert long.input_lengths == right.input_lengths == [1.0, 2.0, 3.0]
    assert (long.shards[0].perf, long.shards[0].storage) == (right.shards[0].perf, right.shards[0].storage)
    with pytest.raises(ConfigError, match="pooling_factors has 2 figures for 3 features"):
        option([1.0, 2.0], 3)
    limit = {"t0": ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0])}
    assert plan_inference(model([100]), world_size=1, constraints=limit).tables


# ------------------------------------------------------------------------------------------------- which error

WHOLE = {"t0": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}


@pytest.mark.parametrize("kwargs", [{}, {"proposer": GreedyProposer()}])
@pytest.mark.parametrize(
    ("hbm", "constraints", "kind"),
    [
        (130, WHOLE, PlannerErrorType.STRICT_CONSTRAINTS),  # row_wise would fit
        (30, WHOLE, PlannerErrorType.INSUFFICIENT_STORAGE),
        (30, None, PlannerErrorType.INSUFFICIENT_STORAGE),
    ],
)
def test_constraints_or_memory(hbm: int, constraints: Any, kind: PlannerErrorType, kwargs: dict[str, Any]) -> None:
    topology = Topology(2, "cuda", hbm_cap=hbm * MIB, ddr_cap=0)
    sharders: Any = get_default_sharders()
    with pytest.raises(PlannerError) as error:
        planner(topology, constraints=constraints, **kwargs).plan(model([10_000_000]), sharders)
    assert error.value.error_type is kind
    if kind is PlannerErrorType.STRICT_CONSTRAINTS:
        assert "row_wise among the sharding types" in str(error.value)


def test_pieces_that_do_not_pack() -> None:
    limits = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(3)}
    with pytest.raises(PlannerError) as error:
        plan_inference(model([100_000] * 3, dim=64), world_size=2, ddr_gb=10 * MIB / (1 << 30), constraints=limits)
    assert error.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


# ------------------------------------------------------------------------------------------------- the hash


def profile(call_ms: float) -> HardwareProfile:
    grid = {
        "row_bytes": [8.0, 64.0],
        "set_bytes": [1e3, 1e6],
        "ids_per_bag": [1.0, 8.0],
        "bag_ns": [[[1.0, 2.0], [3.0, 4.0]]] * 2,
    }
    data = {
        "format": PROFILE_FORMAT,
        "device": "cpu",
        "name": "test",
        "threads": 1,
        "call_ms": call_ms,
        "feature_ms": 0.0,
        "grids": {"8": grid},
        "memory_bytes_per_ms": 1e7,
    }
    return HardwareProfile.from_json(json.dumps(data))


def hashed(module: nn.Module, topology: Topology | None = None, sharder: Any = None, **kwargs: Any) -> str:
    made = planner(topology, **kwargs)
    made.plan(module, [sharder or EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    return made.hash_planner_context_inputs_str()


def test_the_hash_covers_tables_and_hardware() -> None:
    limit = {"t0": ParameterConstraints(pooling_factors=[3.0])}
    hashes = [
        hashed(model([8, 9])),
        hashed(model([8, 10])),
        hashed(model([8])),
        hashed(model([8, 9], dim=8)),
        hashed(model([8, 9], num_features=2)),
        hashed(nn.Sequential(model([8, 9]))),
        hashed(model([8, 9]), constraints=limit),
        hashed(model([8, 9]), batch_size=7),
        hashed(model([8, 9]), sharder=EmbeddingBagCollectionSharder(fused_params={"optimizer": "ADAM"})),
        hashed(model([8, 9]), Topology(2, "cpu", hardware=profile(1.0))),
        hashed(model([8, 9]), Topology(2, "cpu", hardware=profile(2.0))),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hashed(model([8, 9])) == hashes[0]
    assert hashed(model([8, 9]), Topology(2, "cpu", hardware=profile(2.0))) == hashes[-1]
    with pytest.raises(ConfigError, match="call plan"):
        planner().hash_planner_context_inputs()


class Stored(PlanLoader):
    """A plan made earlier, with the hash of its inputs."""

    def __init__(self, made: str) -> None:
        self.made, self.loads = made, 0

    def load(self) -> dict[int, ShardingOption] | None:
        self.loads += 1
        return None

    def plan_context_hash(self) -> str | None:
        return self.made


class OwnEnumerator(Enumerator):
    """A user's plan loader: TorchRec's interface and nothing of recinfer's."""

    def __init__(self, topology: Topology, *args: Any, **kwargs: Any) -> None:
        self._inner = EmbeddingEnumerator(topology)
        self.last_stored_search_space: list[ShardingOption] | None = None

    def enumerate(self, module: nn.Module, sharders: Any) -> list[ShardingOption]:
        self.last_stored_search_space = self._inner.enumerate(module, sharders)
        return self.last_stored_search_space

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        self._inner.populate_estimates(sharding_options)


@pytest.mark.parametrize("own", [False, True])
def test_an_earlier_plan_is_for_the_same_tables(own: bool) -> None:
    def enumerator() -> Any:
        return {"enumerator": OwnEnumerator(Topology(2, "cpu"))} if own else {}

    sharders: Any = [EmbeddingBagCollectionSharder()]
    stored = Stored(hashed(model([8, 9]), **enumerator()))
    planner(plan_loader=stored, **enumerator()).plan(model([8, 9]), sharders)
    assert stored.loads == 1
    with pytest.raises(PlannerError, match="made from other inputs") as error:
        planner(plan_loader=stored, **enumerator()).plan(model([8, 10]), sharders)
    assert error.value.error_type is PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH and stored.loads == 1


# ------------------------------------------------------------------------------------------------- figures of no table


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ({"pooling_factors": [-1.0]}, "pooling_factors is -1.0; expected 0 or more"),
        ({"pooling_factors": [math.nan]}, "pooling_factors is nan; expected 0 or more"),
        ({"pooling_factors": [math.inf]}, "pooling_factors is inf; expected 0 or more"),
        ({"num_poolings": [-2.0]}, "num_poolings is -2.0; expected 0 or more"),
        ({"batch_sizes": [0]}, "batch_sizes is 0; expected 1 or more"),
        ({"min_partition": -8}, "min_partition is -8; expected a whole number of columns, 1 or more"),
        ({"min_partition": 2.5}, "min_partition is 2.5; expected a whole number"),
        ({"min_partition": "x"}, "min_partition is 'x'; expected a whole number"),
        ({"pooling_factors": ["x"]}, "pooling_factors has 'x'; expected numbers"),
        ({"output_dtype": "FP16"}, "output_dtype is 'FP16'; expected a DataType"),
        ({"cache_params": CacheParams(load_factor=1.5)}, "load_factor of the cache is 1.5; expected 0 to 1"),
        ({"cache_params": CacheParams(load_factor=math.nan)}, "load_factor of the cache is nan; expected 0 to 1"),
    ],
)
def test_impossible_figures_are_refused_with_names(limit: dict[str, Any], says: str) -> None:
    limits = {"t0": ParameterConstraints(**limit)}
    sharders: Any = get_default_sharders()
    with pytest.raises(ConfigError, match=f"table 't0': {re.escape(says)}"):
        planner(Topology(2, "cuda"), constraints=limits).plan(model([100]), sharders)
    with pytest.raises(ConfigError, match=f"table 't0': {re.escape(says)}"):
        plan_inference(model([100]), world_size=2, compute_device="cuda", constraints=limits)


def test_inference_plans_no_table_of_another_device() -> None:
    def planned(device: str) -> Plan:
        return plan_inference(model([8]), world_size=1, constraints={"t0": ParameterConstraints(device_group=device)})

    assert planned("cpu").tables
    with pytest.raises(ConfigError, match="table 't0': device_group 'cuda' in a plan for 'cpu'"):
        planned("cuda")


def test_pins_are_for_the_default_search() -> None:
    pinned = plan_inference(model([8]), world_size=2)
    with pytest.raises(ConfigError, match="pinned tables need the default search"):
        planner(pinned=pinned, proposer=GreedyProposer())


# ------------------------------------------------------------------------------------------------- bandwidths


class Measured(GeneralizedCommsBandwidth):
    """A user's bandwidths: ``get_bw`` and nothing else."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.asked = factor, set[tuple[int, int, CollectiveType]]()

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        self.asked.add((local_world_size, world_size, collective_type))
        return 2e7 * self.factor


def test_bandwidths_of_get_bw_alone_are_asked_for_each_collective() -> None:
    limits = {"t0": ParameterConstraints(sharding_types=["table_row_wise"])}
    costs = []
    for factor in (1.0, 0.5):
        links = Measured(factor)
        topology = Topology(4, "cuda", local_world_size=2, generalized_comms_bandwidths=links)
        made = planner(topology, constraints=limits)
        made.plan(model([8, 9]), [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
        assert {collective for *_, collective in links.asked} == set(CollectiveType)
        assert (2, 2, CollectiveType.REDUCE_SCATTER) in links.asked and (2, 4, CollectiveType.ALL_TO_ALL) in links.asked
        assert made.report is not None
        costs.append(made.report.max_perf)
    assert costs[0] < costs[1]
    topology = Topology(2, "cuda", generalized_comms_bandwidths=Measured())
    assert topology.intra_host_bw == topology.inter_host_bw == 2e7
    assert (
        plan_inference(model([8]), world_size=2, compute_device="cuda", topology=topology).estimates["max_perf_ms"] > 0
    )


@pytest.mark.parametrize("figure", [0.0, -1.0, math.nan])
def test_invalid_bandwidths_are_refused(figure: float) -> None:
    topology = Topology(2, "cuda", generalized_comms_bandwidths=Measured(figure))
    with pytest.raises(ConfigError, match=r"Measured: .* bytes per millisecond for all_to_all over 2 ranks"):
        plan_inference(model([8]), world_size=2, compute_device="cuda", topology=topology)
    with pytest.raises(ConfigError, match=r"intra_host_bw .*; expected bytes per millisecond above 0"):
        Topology(2, "cuda", intra_host_bw=figure)


def test_sizes_of_another_type_are_refused() -> None:
    for given, what in (
        ({"world_size": 2.5}, "world_size 2.5; expected a whole number"),
        ({"world_size": None}, "world_size None; expected a whole number"),
        ({"world_size": 2, "local_world_size": "x"}, "local_world_size 'x'; expected a whole number"),
        ({"world_size": 2, "ddr_cap": "x"}, "ddr_cap is 'x'; expected bytes"),
        ({"world_size": 2, "hbm_mem_bw": None}, "hbm_mem_bw None; expected bytes per millisecond"),
    ):
        with pytest.raises(ConfigError, match=what):
            Topology(compute_device="cpu", **given)
    with pytest.raises(ConfigError, match="batch_size 'x'; expected a whole number of at least 1"):
        EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu"), batch_size="x")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- TorchEasyRec's


def test_the_proposer_takes_torcheasyrecs_name_and_the_first_of_equal_options() -> None:
    sharders: Any = [EmbeddingBagCollectionSharder()]
    limits = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]) for i in (0, 1)}
    topology = Topology(2, "cuda")
    found = EmbeddingEnumerator(topology, constraints=limits).enumerate(model([1000, 1000]), sharders)
    doubled = [copy.deepcopy(option) for option in found for _ in range(2)]  # options alike in time and memory
    proposer = DynamicProgrammingProposer(mem_bins_per_device=7)
    proposer.load(doubled)
    proposer.feedback(True, storage_constraint=topology)
    best = proposer.propose()
    assert best is not None and [option is doubled[2 * i] for i, option in enumerate(best)] == [True, True]


def test_device_memory_is_an_error_in_a_plan_for_cpu() -> None:
    with pytest.raises(ConfigError, match=r"hbm_gb=1.*ranks on CPU have host memory only; set ddr_gb"):
        plan_inference(model([100]), world_size=1, compute_device="cpu", hbm_gb=1)
