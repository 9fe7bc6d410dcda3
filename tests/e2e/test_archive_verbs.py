"""export --eval-data, reshard and delta through the command line, on a trained model: what a user would type."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.data.dataset import Dataset, load_dataset
from recinfer.inference.predictor import load
from recinfer.training import train


def invoke(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """A checkpoint, a later one of the same model, and held-out rows as CSV."""
    folder = tmp_path_factory.mktemp("verbs")
    dataset = load_dataset(None, "synthetic", limit=3000)
    for epochs in (1, 2):
        train(
            dataset,
            embedding_dim=8,
            epochs=epochs,
            batch_size=256,
            seed=0,
            out=folder / f"{epochs}.ckpt",
            progress=False,
        )
    rows = dataset.take(dataset.test)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows)
        empty = [
            ["" if isinstance(v, float) and np.isnan(v) else v for v in column.tolist()] for column in rows.values()
        ]
        writer.writerows(zip(*[[int(v) if isinstance(v, float) else v for v in column] for column in empty]))
    return folder, dataset


def test_the_verbs_work_together(folder: tuple[Path, Dataset]) -> None:
    root, dataset = folder
    base = ["export", "--checkpoint", root / "1.ckpt", "--eval-data", root / "rows.csv", "--format", "criteo"]
    code, found = invoke(*base, "--out", root / "m.rqa", "--world-size", 2, "--max-auc-drop", 0.01)
    assert code == 0, found
    evaluation = found["report"]["evaluation"]
    assert evaluation["rows"] == len(dataset.test)
    assert abs(evaluation["auc_drop"]) <= 0.01
    assert len(found["report"]["tables"]) == 26
    assert all(0 <= t["relative_error"] < 0.05 for t in found["report"]["tables"])

    code, found = invoke(*base, "--out", root / "refused.rqa", "--precision", "int2", "--max-auc-drop", 0)
    if code:  # two bits may lose nothing by chance
        assert "per table quantized alone" in found["error"]["message"]
        assert not (root / "refused.rqa").exists()

    code, found = invoke("reshard", root / "m.rqa", "--world-size", 3, "--out", root / "m3.rqa")
    assert (code, found["world_size"]) == (0, 3)
    assert invoke("verify", root / "m3.rqa")[1]["ok"]

    code, found = invoke("delta", root / "m3.rqa", root / "2.ckpt", "--out", root / "d.rqd")
    assert code == 0, found
    assert (found["sequence"], found["rows"] > 0) == (1, True)
    code, _ = invoke("export", "--checkpoint", root / "2.ckpt", "--out", root / "full.rqa", "--world-size", 3)
    assert code == 0
    predictor, full = load(root / "m3.rqa"), load(root / "full.rqa")
    dense, features = dataset.contract.apply(dataset.take(dataset.test))
    name = predictor.output_names[0]
    before = predictor.predict(dense, features)[name]
    predictor.apply_delta(root / "d.rqd")
    after, expected = predictor.predict(dense, features)[name], full.predict(dense, features)[name]
    assert torch.allclose(after, expected, atol=1e-5)  # the two plans may cut rows elsewhere
    assert not torch.allclose(after, before, atol=1e-3)


def test_options_that_do_not_go_together(folder: tuple[Path, Dataset]) -> None:
    root, _ = folder
    for arguments, message in (
        (["export", "--checkpoint", root / "1.ckpt", "--out", root / "x.rqa", "--max-auc-drop", 1], "--eval-data"),
        (["reshard", root / "none.rqa", "--out", root / "x.rqa"], "--world-size"),
        (["reshard", root / "none.rqa", "--world-size", 2, "--out", root / "x.rqa"], "does not exist"),
        (["delta", root / "none.rqa", root / "1.ckpt", "--out", root / "x.rqd"], "does not exist"),
    ):
        code, found = invoke(*arguments)
        assert code == 2
        assert message in found["error"]["message"]
    assert not (root / "x.rqa").exists()
