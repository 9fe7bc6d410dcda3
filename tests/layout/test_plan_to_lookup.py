"""The files that docs/explanation/sharding.md lists run between a plan and the lookups of a rank, float and packed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import recinfer
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

PAGE = Path(__file__).parents[2] / "docs/explanation/sharding.md"


def planned(kernel: str, precision: DataType) -> EmbeddingModuleShardingPlan:
    """A table of 8 rows by rows on two ranks."""
    rects = tuple(Rect(rank, 4 * rank, 4 * rank + 4, 0, 8) for rank in range(2))
    plan = Plan(2, "cpu", (TablePlan("", "t", "row_wise", kernel, precision, 8, 8, rects),))
    return plan.to_sharding_plan().plan[""]  # type: ignore[return-value]


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 6, 3]), lengths=torch.tensor([2, 1]))


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[EmbeddingBagConfig(8, 8, "t", feature_names=["f"])])


def look_up_float() -> None:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    sharder.shard(bags(), planned("fused", DataType.FP32), env, torch.device("cpu"))(features()).wait().values()


def look_up_packed() -> None:
    module = QuantEmbeddingBagCollection.from_float(bags())
    plan = dict(planned("quant", DataType.INT8))
    sharded: Any = ShardedQuantEmbeddingBagCollection(module, plan, ShardingEnv.from_local(2, 0), fused=False)
    sharded(features()).values()


def files_run(rank: int, world_size: int, run: Callable[[], None]) -> list[str]:
    """Paths, below recinfer/, of the files whose functions ``run`` calls."""
    root = str(Path(recinfer.__file__).parent) + "/"
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename.removeprefix(root))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sorted(found)


@pytest.mark.parametrize(
    ("run", "kernel"),
    [
        (look_up_float, ["distributed/tables/group_kernel.py", "distributed/tables/cpu.py"]),
        (look_up_packed, ["distributed/quant/runtime.py", "quant/tbe.py"]),
    ],
)
def test_the_six_listed_files_run(run: Callable[[], None], kernel: list[str]) -> None:
    page = PAGE.read_text()
    steps = re.findall(r"^\| \d \| `([\w/.]+)` \|", page, re.MULTILINE)
    listed = [f if f.startswith("recinfer/") else f"recinfer/distributed/{f}" for f in steps]
    listed = [f.removeprefix("recinfer/") for f in listed]
    assert len(listed) == 6
    assert all(f"`{file.removeprefix('distributed/')}`" in page for file in kernel[:1])
    found = run_ranks(2, files_run, run)[0]
    assert [*listed, *kernel] == [file for file in (*listed, *kernel) if file in found]
