"""The planner as a whole: the tutorials' steps, constraints, pins, explanations, one plan for all ranks."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
    plan_inference,
)
from recinfer.distributed.planner.partitioners import GreedyPerfPartitioner
from recinfer.distributed.planner.plot import plot_plan
from recinfer.distributed.planner.proposers import GreedyProposer, UniformProposer
from recinfer.distributed.planner.stats import EmbeddingStats, collapse_ranks, format_plan
from recinfer.distributed.planner.types import PlannerErrorType
from recinfer.distributed.quant.measure import calibrate
from recinfer.distributed.quant.timings import Timings
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.distributed.spawn import run_ranks
from tests.planner.models import GB, collection, model, sharders, train_planner
from tests.planner.test_parts import hardware_of


def table(plan: ShardingPlan, name: str, path: str = ""):
    module_plan = plan.plan[path]
    assert isinstance(module_plan, EmbeddingModuleShardingPlan)
    return module_plan[name]


# ----------------------------------------------------------------------------------------------- the tutorials


class TestPlannerTutorial:
    """Every step of TorchRec's planner tutorial, with what its printed tables say."""

    small = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name="small_table",
                embedding_dim=64,
                num_embeddings=10_000_000,
                feature_names=["small_table_feature"],
                pooling=PoolingType.SUM,
            )
        ],
    )
    huge = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name="huge_table", embedding_dim=1024, num_embeddings=50_000_000, feature_names=["large_table_feature"]
            )
        ],
    )

    def lines(self, module: torch.nn.Module, world_size: int, **kwargs: object) -> tuple[ShardingPlan, str]:
        stats = EmbeddingStats()
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world_size, compute_device="cuda"),
            debug=True,
            stats=stats,
            **kwargs,  # type: ignore[arg-type]
        )
        plan = planner.plan(module, sharders=[EmbeddingBagCollectionSharder()])
        return plan, "\n".join(stats.stats_lines)

    def test_one_gpu_is_table_wise(self) -> None:
        plan, text = self.lines(self.small, 1)
        assert table(plan, "small_table").sharding_type == "table_wise"
        assert "2.38 (7%)" in text and "0.00136" in text and "TW: 1" in text and "--- Planner Statistics ---" in text

    def test_two_gpus_are_row_wise(self) -> None:
        plan, text = self.lines(self.small, 2)
        assert table(plan, "small_table").ranks == [0, 1]
        assert "1.19 (4%)" in text and "0.00272" in text and "RW: 1" in text and "0-1" in text

    def test_constrained_to_table_wise(self) -> None:
        limits = {"small_table": ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])}
        plan, text = self.lines(self.small, 2, constraints=limits)
        assert table(plan, "small_table").ranks == [0] and "0.25" in text

    def test_pooling_factor_makes_it_dearer(self) -> None:
        _, text = self.lines(self.small, 2, constraints={"small_table": ParameterConstraints(pooling_factors=[200.0])})
        assert "0.0865" in text and "0.781" in text and "0.173" in text

    def test_huge_table_goes_to_host_memory_behind_a_cache(self) -> None:
        plan, text = self.lines(self.huge, 2)
        sharding = table(plan, "huge_table")
        assert (sharding.sharding_type, sharding.compute_kernel) == ("column_wise", "fused_uvm_caching")
        assert sharding.ranks == [0, 0, 0, 0, 1, 1, 1, 1] and "95.4 (75%)" in text and "CW: 4" in text


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes"),
    [
        ("table_wise", None, [[4096, 64]]),
        ("row_wise", [0, 1], [[2048, 64], [2048, 64]]),
        ("column_wise", [0, 1], [[4096, 32], [4096, 32]]),
        ("data_parallel", [0, 1], None),
    ],
)
def test_sharding_tutorial_plans(kind: str, ranks: list[int] | None, sizes: list[list[int]] | None) -> None:
    names = ["large_table_0", "large_table_1", "small_table_0", "small_table_1"]
    tables = [
        EmbeddingBagConfig(
            name=n, embedding_dim=64, num_embeddings=4096 if "large" in n else 1024, feature_names=[n + "_feature"]
        )
        for n in names
    ]
    limits = {n: ParameterConstraints(sharding_types=[kind]) for n in names}
    plan = train_planner(2, constraints=limits).plan(EmbeddingBagCollection(tables, device="meta"), sharders())
    large = table(plan, "large_table_0")
    if kind == "table_wise":  # a large and a small one on each rank
        assert sorted(table(plan, n).ranks[0] for n in names[:2]) == [0, 1]
        assert sorted(table(plan, n).ranks[0] for n in names[2:]) == [0, 1]
    else:
        assert large.ranks == ranks
    assert (None if large.sharding_spec is None else [s.shard_sizes for s in large.sharding_spec.shards]) == sizes


# ----------------------------------------------------------------------------------------------- search


def test_given_proposers_run_as_documented_and_are_not_better() -> None:
    shapes = [(10 ** (3 + i % 4), (32, 64, 128, 256)[i % 4]) for i in range(12)]
    ours = train_planner(4)
    ours.plan(collection(shapes), sharders())
    for parts in (
        {"proposer": [GreedyProposer(), UniformProposer()]},
        {"partitioner": GreedyPerfPartitioner()},
    ):
        theirs = train_planner(4, **parts)
        theirs.plan(collection(shapes), sharders())
        assert ours.report is not None and theirs.report is not None
        assert theirs.report.num_proposals > 1
        assert ours.report.max_perf <= theirs.report.max_perf * (1 + 1e-9)
        assert theirs.report.lower_bound == pytest.approx(ours.report.lower_bound)


def test_callbacks_get_the_plan_of_the_default_search() -> None:
    shapes = [(10 ** (3 + i % 4), (32, 64, 128, 256)[i % 4]) for i in range(12)]
    ours, called = train_planner(4), train_planner(4, callbacks=[lambda plan: plan])
    assert ours.plan(collection(shapes), sharders()).plan == called.plan(collection(shapes), sharders()).plan
    assert ours.last_plan is not None and called.last_plan is None


def test_callbacks_change_the_plan() -> None:
    def to_rank_1(plan: list) -> list:
        for option in plan:
            for shard in option.shards:
                shard.rank = 1
        return plan

    planner = train_planner(
        2, callbacks=[to_rank_1], constraints={"t0": ParameterConstraints(sharding_types=["table_wise"])}
    )
    assert table(planner.plan(collection([(100, 16)]), sharders()), "t0").ranks == [1]


def test_timeout_bounds_the_search() -> None:
    shapes = [(10 ** (3 + i % 4), (32, 64, 128, 256)[i % 4]) for i in range(100)]
    reports = []
    for seconds in (0, None):
        planner = train_planner(16, timeout_seconds=seconds)
        planner.plan(collection(shapes), sharders())
        assert planner.last_plan is not None and planner.report is not None
        reports.append(planner.report)
    bounded, whole = reports
    assert bounded.moves == 0 < whole.moves  # a first placement is made, however late it is
    assert bounded.max_perf > whole.max_perf


def test_pinned_tables_stay_and_the_rest_is_planned() -> None:
    shapes = [(1000, 64)] * 6
    limits = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(6)}
    first = plan_inference(model(shapes), world_size=3, constraints=limits)
    moved = [t for t in first.tables if t.table in ("t0", "t1")]
    pinned = plan_inference(model(shapes), world_size=3, pinned=moved)
    for t in moved:
        assert pinned.table(t.module, t.table).ranks == t.ranks
    planner = train_planner(3, constraints=limits)
    planner.plan(collection(shapes), sharders())
    assert planner.last_plan is not None
    again = train_planner(3, pinned=planner.last_plan)
    again.plan(collection(shapes), sharders())
    assert again.last_plan is not None and again.last_plan.hash == planner.last_plan.hash
    with pytest.raises(PlannerError, match="matches no option"):
        plan_inference(model(shapes), world_size=1, pinned=[t for t in first.tables if t.ranks == (2,)])
    with pytest.raises(ConfigError, match="not in the model"):
        plan_inference(model(shapes[:2]), world_size=3, pinned=first)


def test_tables_that_must_share_ranks_do() -> None:
    shapes = [(100_000, 64)] * 5
    limits = {f"t{i}": ParameterConstraints(colocate_with="user", sharding_types=["table_wise"]) for i in (1, 3)}
    plan = plan_inference(model(shapes), world_size=5, constraints=limits)
    ranks = [t.ranks for t in plan.tables]
    assert ranks[1] == ranks[3]
    limits["t3"] = ParameterConstraints(colocate_with="user", sharding_types=["row_wise"])
    with pytest.raises(PlannerError, match="no sharding type, kernel and number of pieces in common"):
        plan_inference(model(shapes), world_size=5, constraints=limits)


def test_equal_loads_are_spread_by_size() -> None:
    rows = [1_000_000, 900_000, 800_000, 700_000, 100, 100, 100, 100]
    limits = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(8)}
    e = plan_inference(model([(r, 64) for r in rows]), world_size=4, constraints=limits).estimates
    used = e["ddr_bytes_per_rank"]
    assert e["gap"] == pytest.approx(1) and max(used) < 1.6 * min(used)


def test_small_precision_and_one_table_apart() -> None:
    plan = plan_inference(
        model([(1000, 72), (1000, 64)]),
        world_size=2,
        precision=DataType.INT4,
        per_table_precision={"t1": DataType.FP16},
        constraints={"t0": ParameterConstraints(sharding_types=["column_wise"])},
    )
    assert [t.precision for t in plan.tables] == [DataType.INT4, DataType.FP16]
    assert (
        all(s.col_start % 4 == 0 and s.cols % 4 == 0 for s in plan.tables[0].shards) and len(plan.tables[0].shards) == 2
    )


# ----------------------------------------------------------------------------------------------- nothing fits


def test_explains_a_table_too_large_for_any_rank() -> None:
    with pytest.raises(PlannerError) as error:
        plan_inference(model([(100_000_000, 64), (10, 8)]), world_size=2, compute_device="cpu", ddr_gb=1)
    text = str(error.value)
    assert error.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert (
        "sparse.ebc.t0, which needs 3.167 GiB" in text
        and "of ddr; rank 0 has 1.000 GiB" in text
        and "bytes short" in text
    )
    assert "7 ranks instead of 2" in text and "of ddr per rank" in text
    assert plan_inference(model([(100_000_000, 64), (10, 8)]), world_size=7, ddr_gb=1).world_size == 7


def test_explains_with_kernel_and_precision() -> None:
    limits = {"t0": ParameterConstraints(compute_kernels=["quant"])}
    with pytest.raises(PlannerError) as error:
        plan_inference(
            model([(30_000_000, 64)]), world_size=1, compute_device="cuda", hbm_gb=1.5, ddr_gb=64, constraints=limits
        )
    assert "precision INT4 instead of INT8" in str(error.value)
    assert "kernels that keep rows in host memory" in str(error.value)


def test_explains_when_all_together_are_too_large() -> None:
    with pytest.raises(PlannerError, match=r"All tables together need at least .* of ddr"):
        plan_inference(model([(5_000_000, 64)] * 8), world_size=2, compute_device="cpu", ddr_gb=1)
    topology = Topology(2, "cuda", hbm_cap=GB, ddr_cap=GB)
    with pytest.raises(PlannerError, match="bytes short"):
        train_planner(2, topology=topology).plan(collection([(5_000_000, 64)] * 8), sharders())
    with pytest.raises(PlannerError, match="What would help"):
        train_planner(2, topology=topology, proposer=GreedyProposer()).plan(
            collection([(9_000_000, 64)] * 8), sharders()
        )


def test_error_when_there_is_nothing_to_plan() -> None:
    with pytest.raises(ConfigError, match="Linear has no tables"):
        plan_inference(torch.nn.Linear(2, 2), world_size=1)
    with pytest.raises(ConfigError, match=r"constraints name tables \['other'\]"):
        plan_inference(model([(10, 8)]), world_size=1, constraints={"other": ParameterConstraints()})
    with pytest.raises(ConfigError, match=r"precisions are given for tables \['other'\]"):
        plan_inference(model([(10, 8)]), world_size=1, per_table_precision={"other": DataType.INT4})


# ----------------------------------------------------------------------------------------------- one plan for all


def _plan_together(rank: int, world_size: int, path: str) -> None:
    shapes = [(100 + rank, 16), (50, 32)]  # the ranks see different models: only rank 0's counts
    for cap in (GB, 10):
        planner = train_planner(2, topology=Topology(2, "cuda", hbm_cap=cap, ddr_cap=cap))
        try:
            text = str(planner.collective_plan(collection(shapes), sharders()))
        except PlannerError as error:
            text = "error " + str(error)
        Path(path, f"{rank}-{cap}").write_text(text)


def test_rank_0_plans_for_all_and_fails_for_all(tmp_path: Path) -> None:
    run_ranks(2, _plan_together, str(tmp_path))
    for cap in (GB, 10):
        first, second = ((tmp_path / f"{rank}-{cap}").read_text() for rank in (0, 1))
        assert first == second and first.startswith("error") == (cap == 10)
        assert cap == 10 or "[100, 16]" in first


# ----------------------------------------------------------------------------------------------- reports


def test_stats_log_bound_reservation_and_tables(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        EmbeddingShardingPlanner(topology=Topology(2, "cuda")).plan(collection([(1000, 64)] * 3), sharders())
    text = caplog.text
    for what in ("Lower bound", "Reserved: 15% of memory", "Headroom", "Compute Kernels:", "Parameter Info:", ".t2"):
        assert what in text
    assert collapse_ranks([0, 1, 2, 5]) == "0-2,5" and collapse_ranks([0, 0, 1]) == "0,0,1"


def test_rich_tables_and_picture(tmp_path: Path) -> None:
    from rich.console import Console

    plan = plan_inference(model([(1000, 64)] * 3), world_size=2)
    console = Console(file=io.StringIO(), width=140)
    console.print(*format_plan(plan, max_tables=2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "t0 " in text and "sparse.ebc" not in text and "gap" in text and "1 lighter tables" in text
    pytest.importorskip("matplotlib")
    plot_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_calibrated_estimates_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("recinfer.distributed.quant.measure._ROUNDS", 2)
    monkeypatch.setattr("recinfer.distributed.quant.measure._AGREEMENT", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        measured = calibrate(seconds_per_point=0.0005, precisions=[DataType.INT8], max_set_bytes=1 << 20)
        assert torch.get_num_threads() == threads + 1 and measured.threads == 1
    finally:
        torch.set_num_threads(threads)
    assert "the rounds of this calibration disagree by a factor of" in caplog.text
    assert measured.notes["disagreement"] >= 1
    typical = plan_inference(model([(1000, 64)] * 3), world_size=2).estimates
    assert measured.call_ms > 0
    for hardware in (measured, hardware_of(bag_ns=5.0, far_ns=2.0)):
        e = plan_inference(model([(1000, 64)] * 3), world_size=2, hardware=hardware).estimates
        assert 0 < e["max_perf_ms"] != typical["max_perf_ms"]
    with pytest.raises(ConfigError, match="profile is of a cpu"):
        plan_inference(model([(1000, 64)]), world_size=2, compute_device="cuda", hardware=measured)
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError):
            calibrate("cuda")
    with pytest.raises(ConfigError, match="threads 0"):
        calibrate(threads=0)


@pytest.mark.parametrize(("second_ms", "factor"), [((2.0, 4.0), 1.0), ((6.0, 12.0), 3.0)])
def test_timings_report_how_far_their_rounds_disagree(second_ms: tuple[float, float], factor: float) -> None:
    def clock() -> Iterator[float]:
        now = 0.0
        for took in (2.0, 2.0, 4.0, 4.0, *(ms for ms in second_ms for _ in (0, 1))):
            yield now
            now += took / 1e3
            yield now

    timings = Timings()
    timings._clock = clock().__next__
    for _ in range(2):
        assert timings.disagreement() == 1.0
        timings.add({name: (lambda request: request, lambda seed: seed) for name in "ab"}, 0.0)  # type: ignore[misc]
    assert timings.disagreement() == pytest.approx(factor)
    assert timings.ms("a") == pytest.approx((2.0 + second_ms[0]) / 2)


def test_planning_imports_no_kernels() -> None:
    import subprocess
    import sys

    code = "import sys, recinfer.distributed.planner; print([m for m in sys.modules if 'fbgemm' in m or 'scipy' in m])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_tables_of_one_name_in_two_modules_are_named_by_module() -> None:
    root = torch.nn.Module()
    root.left, root.right = model([(10, 8)]), model([(10, 8)])
    (name,) = {t.table for t in plan_inference(root, world_size=1).tables}
    tables = plan_inference(root, world_size=1).tables
    chosen = {tables[0].name: DataType.INT4, name: DataType.FP16}
    found = {t.name: t.precision for t in plan_inference(root, world_size=1, per_table_precision=chosen).tables}
    assert found == {tables[0].name: DataType.INT4, tables[1].name: DataType.FP16}
