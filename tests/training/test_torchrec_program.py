"""A training program written for TorchRec runs here by the package's name alone, to the losses of plain torch."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.spawn import run_ranks

PROGRAM = Path(__file__).with_name("torchrec_program.txt")
PIPELINES = ["TrainPipelineBase", "TrainPipelineSparseDist"]


def load(package: str) -> dict[str, Any]:
    """The names that the program defines, with ``package`` instead of torchrec."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(PROGRAM.read_text().replace("torchrec", package), str(PROGRAM), "exec"), names)
    return names


def on_rank(rank: int, world_size: int, package: str, folder: str) -> list[tuple[list[float], list[str]]]:
    program = load(package)
    return [program["main"](f"{folder}/{kind}", kind) for kind in PIPELINES]


def plain_losses() -> list[float]:
    """The same training by torch alone: one process, whole tables, Adagrad."""
    program = load("recinfer")
    dim, rows, tables = program["DIM"], program["ROWS"], program["BAGS"]
    bags = nn.ModuleDict({t: nn.EmbeddingBag(rows, dim, mode="sum", include_last_offset=True) for t in tables})
    clicks = nn.Embedding(rows, dim)
    for i, t in enumerate(tables):
        nn.init.constant_(bags[t].weight, 0.1 * (i + 1))
    nn.init.constant_(clicks.weight, 0.3)
    over = program["Model"]().over
    parameters = [*bags.parameters(), *clicks.parameters(), *over.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=program["LR"], eps=1e-8)
    losses = []
    for batch in program["make_batches"](0, 1):
        pooled = [bags[t](batch.bags[f"{t}_id"].values(), batch.bags[f"{t}_id"].offsets()) for t in tables]
        sequence = clicks(batch.clicks.values()).reshape(-1, 2 * dim)
        logits = over(torch.cat([batch.dense, *pooled, sequence], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("package", ["recinfer", "torchrec"])
def test_it_trains_as_plain_torch(package: str, world_size: int, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    expected = plain_losses()
    assert len(expected) == 8 and min(abs(a - b) for a, b in pairwise(expected)) > 1e-3
    for found in run_ranks(world_size, on_rank, package, str(tmp_path)):
        for losses, kinds in found:
            assert losses == pytest.approx(expected, abs=1e-5)
            assert kinds == ["column_wise", "data_parallel", "row_wise", "table_wise"]
