"""Programs in the style of the published ones, written for TorchRec, run after ``recinfer migrate``, and by TorchRec.

Each is compared with the same model trained or run by torch alone: one process, whole tables.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recinfer.data.metrics import auc
from recinfer.migrate import migrate_file
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from tests.distributed.spawn import run_ranks

PROGRAMS = Path(__file__).with_name("programs")
STEPS = 12


def load(name: str, package: str = "recinfer") -> dict[str, Any]:
    """The names that a program defines, by recinfer as migration has it, or by torchrec as it is written."""
    change = migrate_file(PROGRAMS / f"{name}.txt")
    assert (change.missing, change.by_hand) == ((), ())
    names: dict[str, Any] = {"__name__": name}
    exec(compile(change.before if package == "torchrec" else change.after, f"{name}.py", "exec"), names)
    return names


def on_rank(rank: int, world_size: int, name: str, package: str, *args: Any) -> Any:
    return load(name, package)["main"](*args)


def run(name: str, package: str, world_size: int, *args: Any) -> list[Any]:
    """What ``main(*args)`` gives on each rank."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return run_ranks(world_size, on_rank, name, package, *args)


PACKAGES = pytest.mark.parametrize(("package", "world_size"), [("recinfer", 1), ("recinfer", 2), ("torchrec", 1)])


@pytest.fixture(scope="module")
def criteo_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Binary files of a day whose labels follow from two features."""
    folder, random = tmp_path_factory.mktemp("criteo"), np.random.RandomState(0)
    rows = 32 * STEPS
    dense, sparse = random.rand(rows, 13).astype(np.float32), random.randint(0, 1000, (rows, 26))
    labels = (dense[:, :1] + (sparse[:, :1] % 2) > 1).astype(np.int32)
    for name, array in (("dense", dense), ("sparse", sparse), ("labels", labels)):
        np.save(folder / f"day_0_{name}.npy", array)
    return str(folder)


@PACKAGES
@pytest.mark.parametrize(("kind", "multi_hot"), [("original", False), ("dcn", True), ("projection", True)])
def test_clicks(package: str, world_size: int, kind: str, multi_hot: bool, criteo_files: str) -> None:
    program = load("clicks")
    model = program["make_model"](kind, torch.device("cpu"))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=program["LR"], eps=1e-4)
    schedule = program["WarmUpAndDecay"](optimizer, warm_up=4, decay_start=8, decay_steps=10)
    losses, rates = [], []
    for batch in program["make_batches"](criteo_files, "train", multi_hot, 0, 1):
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(step(optimizer, [model(batch)[0]]))
        schedule.step()
    assert len(losses) == STEPS and len(set(rates)) > 6
    with torch.no_grad():
        tests = list(program["make_batches"](criteo_files, "test", multi_hot, 0, 1))
        expected = [(s, y) for b in tests for s, y in zip(torch.sigmoid(model(b)[1][1]).tolist(), b.labels.tolist())]

    found = run("clicks", package, world_size, criteo_files, kind, multi_hot)
    for own_losses, own_rates, _ in found:
        assert own_losses == pytest.approx(losses, abs=1e-5)
        assert own_rates == pytest.approx(rates)
    scored = [pair for _, _, part in found for pair in part]
    assert sorted(score for score, _ in scored) == pytest.approx(sorted(score for score, _ in expected), abs=1e-4)
    found_auc, expected_auc = (auc(*np.array(pairs)[:, ::-1].T) for pairs in (scored, expected))
    assert found_auc == pytest.approx(expected_auc, abs=1e-3)


@PACKAGES
@pytest.mark.parametrize("dense_table", ["", "t_cat_10"])
def test_golden(package: str, world_size: int, dense_table: str) -> None:
    program = load("golden")
    model = program["make_model"](torch.device("cpu"))
    tables = list(model.model.sparse_arch.parameters())
    rest = [p for name, p in model.named_parameters() if "sparse" not in name]
    optimizers = [RowWiseAdagrad(tables, lr=program["LR"]), torch.optim.Adagrad(rest, lr=program["LR"])]
    sources = [iter(program["make_batches"](rank)) for rank in range(world_size)]
    losses = [step(optimizers, [model(next(s))[0] for s in sources]) for _ in range(program["STEPS"])]
    for found in run("golden", package, world_size, dense_table):
        assert found == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize(
    ("package", "world_size", "mode"),
    # TorchRec 1.8 refuses Adam in the backward on CPU, so only DDP is compared with it.
    [("recinfer", 1, "dmp"), ("recinfer", 2, "dmp"), ("recinfer", 2, "ddp"), ("torchrec", 2, "ddp")],
)
def test_sequences(package: str, world_size: int, mode: str) -> None:
    program = load("sequences")
    model = program["Guess"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=program["LR"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    losses = []
    for epoch in range(program["EPOCHS"]):
        sequences, rows, places, wanted = program["make_batch"](epoch, 0, 1)
        guesses = model(sequences)[rows, places]
        losses.append(step(optimizer, [torch.nn.functional.cross_entropy(guesses, wanted)]))
        schedule.step()
    assert losses[-1] < losses[0]
    for found in run("sequences", package, world_size, mode):
        # Fused Adam leaves rows alone that no id names, where Adam goes on along their old gradients.
        assert found == pytest.approx(losses, abs=1e-4 if mode == "ddp" else 0.05)


@PACKAGES
def test_scoring(package: str, world_size: int, tmp_path: Path) -> None:
    program = load("scoring")
    torch.manual_seed(4)
    model = program["make_model"](torch.device("cpu")).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with torch.no_grad():
        expected = [torch.sigmoid(model(batch)[1][1]).tolist() for batch in program["make_batches"]()]
    for found in run("scoring", package, world_size, str(tmp_path / "weights.pt")):
        assert found == [pytest.approx(scores, abs=1e-6) for scores in expected]


def step(optimizers: Any, losses: list[torch.Tensor]) -> float:
    """One step along the mean of ``losses``, which is given back."""
    loss = torch.stack(losses).mean()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()
