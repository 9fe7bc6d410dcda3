"""TorchRec's two tutorials, run top to bottom as the scripts in examples/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"

# Runs an example, then prints the hashes of the plans that it made.
NOTING = """
import json, runpy, sys
from recinfer.distributed.planner import EmbeddingShardingPlanner

made, plan = [], EmbeddingShardingPlanner.plan
def noting(self, *args, **options):
    found = plan(self, *args, **options)
    made.append(self.last_plan.hash[:16])
    return found
EmbeddingShardingPlanner.plan = noting
runpy.run_path(sys.argv[1], run_name="__main__")
print(json.dumps(made))
"""

# Runs an example, whose ranks are forked from this program in place of spawned.
FORKING = """
import multiprocessing, runpy, sys

forks = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: forks
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_warm(code: str, *args: str) -> str:
    """Output of ``python -c code *args``."""
    returncode, out, err = run_program(code, *args)
    assert returncode == 0, err
    return out


def test_planner_tutorial_prints_the_tables_of_the_text_and_makes_the_same_plans() -> None:
    """The plans are pinned by their hashes, so that no rectangle moves unintentionally."""
    text = run_warm(NOTING, str(EXAMPLES / "tutorial_planner.py"))
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
    assert json.loads(text.splitlines()[-1]) == [
        "aac479048b6e4a66",
        "30f1c2a4e8cb3c71",
        "daa0e805ba22eb71",
        "30f1c2a4e8cb3c71",
        "4807690dd60e3093",
    ]


def test_sharding_tutorial_runs_on_two_ranks_and_prints_the_plan_of_the_text() -> None:
    text = run_warm(FORKING, str(EXAMPLES / "tutorial_sharding.py"), "row_wise")
    half = "ShardMetadata(shard_offsets=[2048, 0], shard_sizes=[2048, 64], placement=rank:1/cuda:1)"
    assert "rank:0,sharding plan: {'': {'large_table_0': ParameterSharding(sharding_type='row_wise'" in text
    assert text.count(half) == 4  # two large tables, printed by two ranks
    assert text.count("output: (2, 256)") == 2


@pytest.mark.nightly
def test_sharding_tutorial_runs_with_copies_on_two_ranks() -> None:
    """tests/planner/test_example_plans.py has the plan by day. The ranks start as they do for a reader."""
    command = [sys.executable, str(EXAMPLES / "tutorial_sharding.py"), "data_parallel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.count("ParameterSharding(sharding_type='data_parallel', compute_kernel='dense', ranks=[0, 1], "
                      "sharding_spec=None)") == 8  # fmt: skip
    assert text.count("output: (2, 256)") == 2
