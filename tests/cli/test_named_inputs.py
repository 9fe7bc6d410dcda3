"""``recinfer inspect`` and ``recinfer predict`` of models with named inputs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recinfer
from recinfer.checkpoint.resolve import resolve_inputs
from recinfer.errors import InputError
from recinfer.inference.predictor import load
from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.e2e.commands import run, run_json
from tests.inference.test_archived import Aged
from tests.serving.named_models import ask_priced, make_archive
from tests.serving.test_named_inputs import lists_of
from tests.serving.v1 import columns_of, rows_of
from tests.zoo.drawing import Bag


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


def test_the_dense_numbers_of_a_file_have_the_name_that_inspect_shows(tmp_path: Path) -> None:
    ids = KeyedJaggedTensor(["user", "item"], torch.arange(6), lengths=torch.tensor([2, 0, 1, 1, 1, 1]))
    model = recinfer.export(Aged(), (torch.rand(3, 2), ids), tmp_path / "aged.rqa", precision="fp32", progress=False)
    wanted = model.predict([[0.5, 7.0]], {"user": [[1, 2]], "item": [[3]]})["output"]
    assert next(one["name"] for one in run_json("inspect", tmp_path / "aged.rqa")["inputs"]) == "age"
    with Server({"aged": model.predictor}) as server:
        for name in ("age", "dense"):
            lines, table, out = tmp_path / "rows.jsonl", tmp_path / "rows.csv", tmp_path / "out.csv"
            lines.write_text(json.dumps({"user": [1, 2], "item": [3], name: [0.5, 7.0]}))
            table.write_text(f"user,item,{name}\n1 2,3,0.5 7.0\n")
            for path in (lines, table):
                assert run_json("predict", "--target", server.target, "--rows", path, "--out", out)["failed"] == 0
                with out.open() as file:
                    (row,) = csv.DictReader(file)
                assert float(row["output"]) == pytest.approx(wanted.item())


def test_a_file_of_another_class_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.save(Bag("user", torch.arange(2), torch.tensor([1, 1])), tmp_path / "batch.pt")
    with pytest.raises(InputError, match=r"batch.pt' holds a tests\.zoo\.drawing\.Bag; save tensors in plain"):
        resolve_inputs(str(tmp_path / "batch.pt"))


def test_inspect_of_a_checkpoint_says_what_is_expected(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.pt")
    code, _, err = run("inspect", tmp_path / "model.pt")
    assert code == 2
    assert "it is no text; expected a JSON file of `recinfer plan`" in " ".join(err.split())
