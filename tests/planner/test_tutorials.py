"""TorchRec's two tutorials, run top to bottom as the scripts in examples/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *args: str) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planner_tutorial_prints_the_tables_of_the_text() -> None:
    text = run_example("tutorial_planner.py")
    assert text.count("--- Planner Statistics ---") == 5
    for said in (
        "2.38 (7%)",
        "1.19 (4%)",
        "TW: 1",
        "RW: 1",
        "CW: 4",
        "95.4 (75%)",
        "fused_uvm_caching",
        "0,0,0,0,1,1,1,1",
    ):
        assert said in text, said


def test_sharding_tutorial_runs_on_two_ranks_and_prints_the_plans_of_the_text() -> None:
    text = run_example("tutorial_sharding.py", "row_wise", "data_parallel")
    half = "ShardMetadata(shard_offsets=[2048, 0], shard_sizes=[2048, 64], placement=rank:1/cuda:1)"
    assert "rank:0,sharding plan: {'': {'large_table_0': ParameterSharding(sharding_type='row_wise'" in text
    assert text.count(half) == 4  # two large tables, printed by two ranks
    assert text.count("ParameterSharding(sharding_type='data_parallel', compute_kernel='dense', ranks=[0, 1], "
                      "sharding_spec=None)") == 8  # fmt: skip
    assert text.count("output: (2, 256)") == 4
