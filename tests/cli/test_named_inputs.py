"""``recinfer inspect`` and ``recinfer predict`` of models with named inputs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recinfer.inference.predictor import load
from recinfer.serving.server.server import Server
from tests.e2e.commands import run, run_json
from tests.serving.named_models import ask_priced, make_archive
from tests.serving.test_named_inputs import lists_of
from tests.serving.v1 import columns_of, rows_of


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_archive(tmp_path_factory.mktemp("priced"), "priced")


@pytest.fixture(scope="module")
def target(archive: Path) -> Iterator[str]:
    with Server({"priced": load(archive)}) as server:
        yield server.target


def test_inspect_shows_the_inputs(archive: Path, tmp_path: Path) -> None:
    code, out, _ = run("inspect", archive)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "input path kind dtype shape facts" in lines
    assert any(
        line.startswith("price price tensor float32 [batch,") for line in lines
    )  # cells are folded at 80 columns
    assert any(line.startswith("slot features['slot'] ids int64 [any] exactly 2") for line in lines)
    described = {one["name"]: one for one in run_json("inspect", archive)["inputs"]}
    assert described["history_price"]["facts"] == "as many as history"
    assert described["weekday"]["shape"] == ["batch"]
    hashed = make_archive(tmp_path, "hashed")
    found = run_json("inspect", hashed)
    assert set(found["computed_features"]) == {"user", "item_hashed", "shop"}
    assert found["ids_engine"] in ("onnxruntime", "torch")
    assert "ids program" in run("inspect", hashed)[1]


def test_predict_takes_them_from_files(archive: Path, target: str, tmp_path: Path) -> None:
    asked = ask_priced(5, seed=9)
    want = load(archive).predict(None, asked.features, inputs=asked.inputs)["score"]
    source = tmp_path / "rows.json"
    source.write_text(json.dumps({"features": columns_of(asked.features), "inputs": lists_of(asked)}))
    found = run_json("predict", "--target", target, "--input", source, "--batch-size", 2)
    torch.testing.assert_close(torch.tensor(found["outputs"]["score"]), want)
    columns = lists_of(asked)
    rows = [row | {k: column[i] for k, column in columns.items()} for i, row in enumerate(rows_of(asked.features))]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    table = tmp_path / "rows.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        for row in rows:
            cells = [cell if isinstance(cell, list) else [int(cell)] for cell in row.values()]
            writer.writerow([" ".join(map(str, cell)) for cell in cells])
    for path in (lines, table):
        out = tmp_path / f"{path.name}.csv"
        assert run_json("predict", "--target", target, "--rows", path, "--out", out)["failed"] == 0
        with out.open() as file:
            scores = [[float(v) for v in row["score"].split()] for row in csv.DictReader(file)]
        torch.testing.assert_close(torch.tensor(scores), want, rtol=1e-5, atol=1e-6)
