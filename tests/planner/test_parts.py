"""The documented parts one by one: estimators, enumerator, reservations, proposers, partitioners, hand-written plans."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.embedding_types import EmbeddingComputeKernel
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import ParameterConstraints, Topology, create_planner, plan_inference
from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
from recinfer.distributed.planner.model.estimates import NO_ROW_FORMAT, packed_row_bytes, row_format_code
from recinfer.distributed.planner.model.hardware import HardwareProfile, LookupGrid
from recinfer.distributed.planner.model.topology import topology_of
from recinfer.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from recinfer.distributed.planner.perf_models import NoopPerfModel
from recinfer.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from recinfer.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from recinfer.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from recinfer.distributed.planner.types import (
    CustomTopologyData,
    Perf,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardingOption,
    Storage,
)
from recinfer.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from recinfer.distributed.types import CacheParams, ShardingType
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingCollection
from recinfer.quant.rows import row_bytes
from tests.planner.models import GB, collection, sharders

TWO_HOSTS = Topology(8, "cuda", local_world_size=4)


def options(shapes: list[tuple[int, int]], topology: Topology = TWO_HOSTS, **limits: Any) -> list[ShardingOption]:
    constraints = {f"t{i}": ParameterConstraints(**limits) for i in range(len(shapes))} if limits else None
    return EmbeddingEnumerator(topology, 512, constraints).enumerate(collection(shapes), sharders())


def by_label(found: list[ShardingOption]) -> dict[tuple[str, str], ShardingOption]:
    return {(o.sharding_type, o.compute_kernel): o for o in found}


# ----------------------------------------------------------------------------------------------- estimates


def test_packed_rows_are_counted_as_they_are_packed() -> None:
    dims, precisions = (
        [1, 3, 4, 7, 64, 130],
        [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32],
    )
    for alignment in (1, 16):
        cases = [(dim, precision) for precision in precisions for dim in dims]
        expected = [row_bytes(dim, precision, alignment) for dim, precision in cases]
        codes = [row_format_code(precision) for _, precision in cases]
        assert packed_row_bytes([dim for dim, _ in cases], codes, alignment).tolist() == expected
        assert packed_row_bytes(7, row_format_code(DataType.INT4), alignment) == row_bytes(7, DataType.INT4, alignment)


def test_rows_that_are_not_packed_have_no_packed_size() -> None:
    assert row_format_code(DataType.INT64) == NO_ROW_FORMAT
    with pytest.raises(ConfigError, match="no row format has the code 0"):
        packed_row_bytes(8, NO_ROW_FORMAT)


# Figures that TorchRec 1.8 gives for the same options (benchmarks/planner_parity.py compares thousands of them), but for the
# memory of row_wise: 8,388,608 bytes of it are the partial sums that come in.
GOLDEN = {
    ("data_parallel", "dense"): (0.004363299213524247, 0, 0.008726598427048494, 0.09652704432390738, 3102720, 0),
    ("table_wise", "fused"): (0.017453196854096988, 0.625, 0.034906393708193977, 0.625, 10471424, 0),
    ("column_wise", "fused"): (0.00438881558319398, 0.15625, 0.00877763116638796, 0.15625, 2642432, 0),
    ("row_wise", "fused"): (0.009802538681455546, 0.625, 0.019605077362911092, 0.6463820373467113, 17039360, 0),
    ("table_row_wise", "fused"): (
        0.010895489848975752, 0.16927083333333334, 0.021790979697951504, 0.1906528706800446, 8910848, 0,
    ),
    ("table_wise", "fused_uvm_caching"): (0.7636837842987805, 0.625, 1.527367568597561, 0.625, 8838594, 2050048),
}  # fmt: skip


def test_estimates_are_torchrecs() -> None:
    found = by_label(options([(1001, 512)]))
    for label, (fwd, fwd_comms, bwd, bwd_comms, hbm, ddr) in GOLDEN.items():
        shard = found[label].shards[0]
        assert shard.perf is not None and shard.storage is not None
        p = shard.perf
        np.testing.assert_allclose(
            (p.fwd_compute, p.fwd_comms, p.bwd_compute, p.bwd_comms), (fwd, fwd_comms, bwd, bwd_comms), rtol=1e-9
        )
        assert (shard.storage.hbm, shard.storage.ddr) == (hbm, ddr), label


def test_partial_sums_that_come_in_are_counted() -> None:
    """The rank that sums row pieces receives as much as each rank looked up; a reduce-scatter inside hosts needs none."""
    sums = 8 * 512 * 64 * 4  # ranks x batch x columns x bytes
    for local, kinds in ((8, ("row_wise", "table_row_wise")), (4, ("row_wise",))):
        topology = Topology(8, "cuda", local_world_size=local)
        for kind in ("row_wise", "table_row_wise"):
            option = by_label(options([(800_000, 64)], topology, sharding_types=[kind], pooling_factors=[1.0]))[
                kind, "fused"
            ]
            piece = option.shards[0]
            assert piece.storage is not None
            ids = 512 * 8 * 8 // option.num_shards
            counted = piece.storage.hbm - piece.size[0] * 64 * 4 - ids
            assert counted == sums * (2 if kind in kinds else 1), (local, kind)


def test_wall_time_function_gives_what_the_enumerator_gives() -> None:
    topology = TWO_HOSTS
    for option in options([(1001, 512)]):
        perfs = EmbeddingPerfEstimator.perf_func_emb_wall_time(
            shard_sizes=[s.size for s in option.shards],
            compute_kernel=option.compute_kernel,
            compute_device="cuda",
            sharding_type=option.sharding_type,
            batch_sizes=[512],
            world_size=8,
            local_world_size=4,
            input_lengths=[1.0],
            input_data_type_size=8,
            table_data_type_size=4,
            output_data_type_size=4,
            fwd_a2a_comm_data_type_size=4,
            bwd_a2a_comm_data_type_size=4,
            fwd_sr_comm_data_type_size=4,
            bwd_sr_comm_data_type_size=4,
            num_poolings=[1.0],
            hbm_mem_bw=topology.hbm_mem_bw,
            ddr_mem_bw=topology.ddr_mem_bw,
            hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
            intra_host_bw=topology.intra_host_bw,
            inter_host_bw=topology.inter_host_bw,
            bwd_compute_multiplier=2,
            weighted_feature_bwd_compute_multiplier=1,
            is_pooled=True,
        )
        assert [round(p.total, 12) for p in perfs] == [round(s.perf.total, 12) for s in option.shards if s.perf]


def test_estimators_as_objects_agree_with_the_arrays() -> None:
    found = options([(1001, 512), (64, 16)], pooling_factors=[3.0])
    again = copy.deepcopy(found)
    for option in again:
        for shard in option.shards:
            shard.perf = shard.storage = None
    limits = {f"t{i}": ParameterConstraints(pooling_factors=[3.0]) for i in range(2)}
    EmbeddingPerfEstimator(TWO_HOSTS, limits).estimate(again)
    EmbeddingStorageEstimator(TWO_HOSTS, limits).estimate(again)
    assert again == found


def test_inference_storage_is_packed_rows_and_one_batch() -> None:
    topology = Topology(2, "cuda")
    found = options([(1000, 64)], topology)
    tw = by_label(found)["table_wise", "fused"]
    tw.compute_kernel = "quant"
    tw._tensor = torch.empty(1000, 64, dtype=torch.int8, device="meta")
    tw.module[1]._embedding_bag_configs[0].data_type = DataType.INT8
    EmbeddingStorageEstimator(topology, is_inference=True).estimate([tw])
    assert tw.shards[0].storage == Storage(1000 * 80 + 512 * 8 + 512 * 64 * 4, 0)  # 64 + 4 bytes per row, padded to 16


def test_offload_stats_read_the_miss_curve() -> None:
    stats = EmbeddingOffloadStats(0.2, 10_000, torch.tensor([100, 200, 300, 400]), height=1000)
    rates = [round(stats.expected_miss_rate(c), 6) for c in (0, 0.1, 0.25, 0.3, 0.5, 0.6, 1.0)]
    assert rates == [1.0, 0.9, 0.9, 0.7, 0.7, 0.4, 0.0]
    cached = options([(1001, 512)], cache_params=CacheParams(load_factor=0.5, stats=stats))
    perf = by_label(cached)["table_wise", "fused_uvm_caching"].shards[0].perf
    assert perf is not None and perf.prefetch_compute == pytest.approx(0.417232506322307)
    with pytest.raises(ConfigError):
        EmbeddingOffloadStats(0.2, 10, torch.zeros(0), height=10)


def test_plans_for_inference_count_the_misses_that_cache_statistics_expect() -> None:
    def perf_ms(stats: EmbeddingOffloadStats | None) -> float:
        cache = CacheParams(load_factor=0.1, stats=stats)
        limit = ParameterConstraints(compute_kernels=["quant_uvm_caching"], cache_params=cache)
        plan = plan_inference(collection([(1000, 64)]), world_size=1, compute_device="cuda", constraints={"t0": limit})
        return float(plan.tables[0].estimates["perf_ms"])

    stats = EmbeddingOffloadStats(0.2, 10_000, torch.tensor([100, 200, 300, 400]), height=1000)
    assert perf_ms(stats) > perf_ms(None)


# ----------------------------------------------------------------------------------------------- enumerator


def test_options_are_those_of_the_sharder_and_the_constraints() -> None:
    kinds = {o.sharding_type for o in options([(1001, 512)])}
    assert kinds == {t.value for t in ShardingType} - {"grid_shard"}  # a grid is offered on request
    grid = options([(1001, 512)], sharding_types=["grid_shard"], compute_kernels=["fused"])
    assert [o.num_shards for o in grid] == [16]
    with pytest.raises(PlannerError, match="no sharding option") as error:
        options([(10, 8)], compute_kernels=["quant"])
    assert error.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    sequence = EmbeddingCollection(
        tables=[EmbeddingConfig(num_embeddings=10, embedding_dim=8, name="s", feature_names=["f"])],
        device=torch.device("meta"),
    )
    found = EmbeddingEnumerator(TWO_HOSTS, 512).enumerate(sequence, [EmbeddingCollectionSharder()])
    assert not found[0].is_pooled and "table_row_wise" not in {o.sharding_type for o in found}


def test_column_pieces_are_multiples_of_four_that_divide() -> None:
    for dim, widths in ((512, [128] * 4), (600, [200] * 3), (300, [300]), (390, [390]), (1024, [128] * 8)):
        found = by_label(options([(10, dim)]))["column_wise", "fused"]
        assert [s.size[1] for s in found.shards] == widths
    narrow = by_label(options([(10, 64)], Topology(2, "cuda"), sharding_types=["column_wise"]))["column_wise", "fused"]
    assert [s.size[1] for s in narrow.shards] == [32, 32]  # asked for nothing else, so it gets pieces


# ----------------------------------------------------------------------------------------------- reservations


def test_reservations_take_what_they_say() -> None:
    module = torch.nn.Sequential(collection([(1001, 512)]), torch.nn.Linear(1000, 1000, device="meta"))
    dense, kjt = 4_004_000, 512 * 8
    share = int(0.15 * 32 * GB)
    for reservation, taken in (
        (HeuristicalStorageReservation(0.15), share + 6 * dense + 20 * kjt),
        (InferenceStorageReservation(0.15), share + dense + kjt),
        (FixedPercentageStorageReservation(0.15), share),
        (FixedAbsoluteStorageReservation.from_gb(2), 2 * GB),
        (HeuristicalStorageReservation(0.0, dense_tensor_estimate=7), 7 + 20 * kjt),
    ):
        left = reservation.reserve(TWO_HOSTS, 512, module, sharders())
        assert abs(32 * GB - left.devices[0].storage.hbm - taken) <= 1
        assert reservation.last_reserved_topology is left
        assert TWO_HOSTS.devices[0].storage.hbm == 32 * GB
    with pytest.raises(PlannerError, match="lower the batch size"):
        FixedAbsoluteStorageReservation.from_gb(33).reserve(TWO_HOSTS, 512, module, sharders())
    with pytest.raises(ConfigError):
        FixedPercentageStorageReservation(1.5)


# ----------------------------------------------------------------------------------------------- partitioners


def option(name: str, by: str, loads: list[int], dependency: str | None = None) -> ShardingOption:
    shards = [Shard([10, 4], [0, 4 * i], Storage(x, x), Perf(x, 0, 0, 0)) for i, x in enumerate(loads)]
    return ShardingOption(
        name, torch.empty(10, 4 * len(loads), device="meta"), ("m", torch.nn.Identity()), [1.0], 8,
        "column_wise", by, "fused", shards, dependency=dependency, is_pooled=True,
    )  # fmt: skip


def test_greedy_partitioner_places_the_documented_example() -> None:
    proposal = [option("a", "uniform", [1, 1]), option("b", "uniform", [2, 2])]
    proposal += [option("c", "device", [3, 3]), option("d", "device", [4, 4])]
    topology = Topology(2, "cuda")
    for partitioner in (GreedyPerfPartitioner(), GreedyPerfPartitioner(SortBy.PERF, balance_modules=True)):
        placed = partitioner.partition(copy.deepcopy(proposal), topology)
        assert NoopPerfModel(topology).rate(placed) == 10
        assert [s.rank for s in placed[0].shards] == [0, 1]
    assert topology.devices[0].storage.hbm == 32 * GB


def test_partitioner_keeps_dependent_options_together_and_says_what_does_not_fit() -> None:
    proposal = [option("a", "device", [5], "x"), option("b", "device", [5], "x"), option("c", "device", [1])]
    placed = GreedyPerfPartitioner().partition(proposal, Topology(2, "cuda"))
    assert placed[0].shards[0].rank == placed[1].shards[0].rank != placed[2].shards[0].rank
    with pytest.raises(PlannerError, match="fits on no rank") as error:
        GreedyPerfPartitioner().partition([option("a", "device", [5])], Topology(2, "cuda", hbm_cap=4))
    assert "needs 5 bytes of hbm" in str(error.value) and "memory has 4 bytes and" in str(error.value)
    assert error.value.error_type is PlannerErrorType.PARTITION


def test_host_options_stay_on_one_host() -> None:
    found = by_label(options([(1001, 512)]))
    for label in (("table_row_wise", "fused"), ("table_column_wise", "fused")):
        placed = GreedyPerfPartitioner().partition([copy.deepcopy(found[label])], TWO_HOSTS)
        assert len({(s.rank or 0) // 4 for s in placed[0].shards}) == 1
        assert sorted(s.rank or 0 for s in placed[0].shards) in ([0, 1, 2, 3], [4, 5, 6, 7])


# ----------------------------------------------------------------------------------------------- proposers


def proposals(proposer: Proposer, found: list[ShardingOption]) -> list[list[ShardingOption]]:
    proposer.load(found)
    made = []
    while (proposal := proposer.propose()) is not None:
        made.append(proposal)
        proposer.feedback(True)
    return made


def test_proposers_walk_the_space() -> None:
    found = options([(1001, 512), (10, 64)], Topology(2, "cuda"), compute_kernels=["fused", "fused_uvm_caching"])
    greedy = GreedyProposer()
    greedy.load(found)
    first = greedy.propose()
    assert first is not None
    best = [min(max(s.perf.total for s in o.shards if s.perf) for o in found if o.name == t) for t in ("t0", "t1")]
    assert [max(s.perf.total for s in o.shards if s.perf) for o in first] == best
    assert len(proposals(GreedyProposer(), found)) > 5
    for plan in proposals(UniformProposer(), found):
        assert len({o.sharding_type for o in plan}) == 1 and len(plan) == 2
    count = len([o for o in found if o.name == "t0"]) * len([o for o in found if o.name == "t1"])
    assert len(proposals(GridSearchProposer(), found)) == count
    assert not proposals(GridSearchProposer(max_proposals=3), found)


def test_greedy_stops_at_its_threshold() -> None:
    greedy = GreedyProposer(threshold=2)
    greedy.load(options([(1001, 512)], Topology(2, "cuda")))
    rounds = 0
    while greedy.propose() is not None:
        rounds += 1
        greedy.feedback(True, perf_rating=1.0 + rounds)
    assert rounds == 3


@pytest.mark.parametrize("ddr_bins", [None, 4])
def test_dynamic_programming_finds_the_cheapest_plan_of_each_size(ddr_bins: int | None) -> None:
    topology = Topology(2, "cuda", hbm_cap=GB, ddr_cap=GB)
    found = options([(100_000, 64), (400_000, 128), (1000, 512)], topology)
    dp = DynamicProgrammingProposer(50, ddr_bins)
    dp.load(found)
    plans = []
    while (plan := dp.propose()) is not None:
        plans.append(plan)
        dp.feedback(True, storage_constraint=topology)
    assert len(plans) > 3
    cheapest = min(sum(o.total_perf for o in p) for p in plans)
    everything = [min(o.total_perf for o in found if o.name == f"t{i}") for i in range(3)]
    assert cheapest == pytest.approx(sum(everything))
    with pytest.raises(ConfigError, match="storage_constraint"):
        fresh = DynamicProgrammingProposer()
        fresh.load(found)
        fresh.feedback(True)


# ----------------------------------------------------------------------------------------------- the rest


def test_topology_refuses_what_does_not_fit_together() -> None:
    assert [d.storage.hbm for d in Topology(2, "cuda", hbm_cap=[1, 2]).devices] == [1, 2]
    custom = CustomTopologyData({"ddr_cap": [5, 6]}, 2)
    assert [d.storage.ddr for d in Topology(2, "cpu", custom_topology_data=custom).devices] == [5, 6]
    for wrong in (
        {"world_size": 0, "compute_device": "cuda"},
        {"world_size": 2, "compute_device": "tpu"},
        {"world_size": 3, "compute_device": "cuda", "local_world_size": 2},
        {"world_size": 2, "compute_device": "cuda", "hbm_cap": [1]},
        {"world_size": 2, "compute_device": "cuda", "hbm_cap": -1},
    ):
        with pytest.raises(ConfigError):
            Topology(**wrong)  # type: ignore[arg-type]


def test_plans_by_hand() -> None:
    ebc = collection([(1000, 64)] * 6)
    plan = construct_module_sharding_plan(
        ebc,
        {
            "t0": table_wise(rank=3),
            "t1": row_wise(),
            "t2": column_wise(ranks=[0, 2]),
            "t3": data_parallel(),
            "t4": table_row_wise(host_index=1),
            "t5": grid_shard(host_indexes=[0, 1]),
        },
        sharder=EmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=4,
        device_type="cuda",
    )
    assert {n: p.ranks for n, p in plan.items()} == {
        "t0": [3], "t1": [0, 1, 2, 3], "t2": [0, 2], "t3": [0, 1, 2, 3], "t4": [2, 3], "t5": [0, 1, 2, 3],
    }  # fmt: skip
    assert str(plan["t4"].sharding_spec.shards[1].placement) == "rank:3/cuda:1"  # type: ignore[union-attr]
    assert plan["t3"].sharding_spec is None and plan["t3"].compute_kernel == EmbeddingComputeKernel.DENSE.value
    assert "table_row_wise" in str(plan)
    with pytest.raises(ConfigError, match="lacks tables"):
        construct_module_sharding_plan(ebc, {"t0": table_wise(0)}, world_size=4, device_type="cuda")
    with pytest.raises(ConfigError, match="outside the world"):
        construct_module_sharding_plan(ebc, apply_to_all(ebc, table_wise(9)), world_size=4, device_type="cuda")
    assert EmbeddingBagCollectionSharder in {type(s) for s in get_default_sharders()}


def test_create_planner_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTRA_NODE_BANDWIDTH", "123.5")
    monkeypatch.setenv("STORAGE_RESERVE_PERCENT", "0.5")
    planner = create_planner(torch.device("cpu"), 64, world_size=2)
    assert planner._topology.intra_host_bw == 123.5
    assert planner._storage_reservation._percentage == 0.5  # type: ignore[attr-defined]
    monkeypatch.setenv("CROSS_NODE_BANDWIDTH", "fast")
    with pytest.raises(ConfigError, match="CROSS_NODE_BANDWIDTH"):
        create_planner(torch.device("cpu"), 64)


def hardware_of(bag_ns: float, far_ns: float) -> HardwareProfile:
    """Rows of 64 and 256 bytes, sets of 10 kB and 100 MB, one id or three a bag; a far row costs ``far_ns`` more."""
    lines = tuple(
        tuple((bag_ns, bag_ns + far * 1.0 * w, bag_ns + far * 3.0 * w) for far in (1.0, far_ns)) for w in (1.0, 2.0)
    )
    grid = LookupGrid((64.0, 256.0), (1e4, 1e8), (0.0, 1.0, 3.0), lines)
    return HardwareProfile("cpu", "test", 1, 0.02, 0.001, {8: grid}, 1e6)


@pytest.mark.parametrize(
    "change",
    [{"call_ms": "1"}, {"threads": 1.5}, {"grids": {"eight": {}}}, {"grids": {"8": {"row_bytes": [64]}}}, {"more": 1}],
)
def test_a_hardware_profile_of_other_types_is_refused(change: dict[str, Any]) -> None:
    data = json.loads(hardware_of(bag_ns=5.0, far_ns=40.0).to_json())
    assert HardwareProfile.from_json(json.dumps(data)).grids.keys() == {8}
    with pytest.raises(ConfigError, match=f"hardware profile.*{next(iter(change))}"):
        HardwareProfile.from_json(json.dumps({**data, **change}))


def test_an_error_of_a_hardware_profile_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "recinfer.plan/1"}')
    with pytest.raises(ConfigError, match=r"plan\.json: not a hardware profile"):
        HardwareProfile.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="Is a directory; expected a file of `recinfer calibrate`"):
        HardwareProfile.load(tmp_path)


def test_hardware_profiles_round_trip_and_interpolate(tmp_path: Path) -> None:
    profile = hardware_of(bag_ns=5.0, far_ns=40.0)
    profile.save(tmp_path / "hw.json")
    assert HardwareProfile.load(tmp_path / "hw.json") == profile
    grid, one = profile.grids[8], np.ones(1)
    assert grid.at(one * 64, one * 1e4, one * 1.0)[0] == pytest.approx(6.0)
    assert grid.at(one * 160, one * 1e8, one * 2.0)[0] == pytest.approx(5.0 + 1.5 * 2 * 40)
    assert grid.at(one * 64, one * 1e4, one * 9.0)[0] == pytest.approx(5.0 + 9)  # longer bags cost on
    assert grid.at(one * 64, one * 1e6, one * 1.0)[0] == pytest.approx(6.0 + 39 / 2)  # halfway in the logarithm
    lookups = {"ids": one * 1e3, "bags": one * 1e3, "row_bytes": one * 64, "bits": one * 8, "features": one}
    ms = profile.lookup_ms(**lookups, rows=one * 1e8 / 64)
    assert ms[0] == pytest.approx(45e-3 + 0.001)
    topology = topology_of(profile, 2)
    assert topology.hardware is profile and topology.ddr_mem_bw == 1e6
    with pytest.raises(ConfigError):
        LookupGrid((64.0,), (1e4, 1e3), (0.0, 1.0), (((1.0, 1.0), (1.0, 1.0)),))
    with pytest.raises(ConfigError, match="two sets"):
        LookupGrid((64.0,), (1e4,), (0.0, 1.0), (((1.0, 1.0),),))
    with pytest.raises(ConfigError, match="recinfer calibrate"):
        HardwareProfile.from_json("{}")
