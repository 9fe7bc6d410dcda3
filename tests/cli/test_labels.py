"""``--label`` of the commands that send requests: the version that the label names answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recinfer.inference.predictor import load
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.server import Server
from tests.e2e.commands import run_json
from tests.serving.conftest import build_model, export

LABELS = {"stable": "7", "canary": "8"}
ROW = {"dense": [[0.5, 1.0, -2.0]], "features": {"user": [[3]], "item": [[5]], "history": [[1, 2]], "shop": [[4]]}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("labels")
    models = [
        ServedModel.of("tiny", load(export(build_model(int(v)), folder / v, "tiny", v)), v) for v in LABELS.values()
    ]
    registry = ModelRegistry(models)
    registry.set_labels("tiny", LABELS)
    with Server(registry) as server:
        yield server.target


@pytest.fixture
def row(tmp_path: Path) -> Path:
    path = tmp_path / "row.json"
    path.write_text(json.dumps(ROW))
    return path


@pytest.mark.parametrize("label", LABELS)
def test_the_version_of_the_label_answers(target: str, row: Path, label: str) -> None:
    common = ["--target", target, "--timeout", 60]
    lookup = ["lookup", *common, "--feature", "user=3"]
    assert run_json(*lookup, "--label", label)["model_version"] == LABELS[label]
    predict = ["predict", *common, "--input", row]
    expected = run_json(*predict, "--version", LABELS[label])["outputs"]
    assert run_json(*predict, "--label", label)["outputs"] == expected
    rows = row.with_suffix(".jsonl")
    rows.write_text(json.dumps({name: column[0] for name, column in ROW["features"].items()} | {"dense": [0, 0, 0]}))
    assert run_json("predict", *common, "--rows", rows, "--label", label)["failed"] == 0
    (level,) = run_json("bench", "serve", *common, "--duration", 0.05, "--label", label)["levels"]
    assert level["requests"] > 0 and level["errors"] == {}


def test_error_names_an_unknown_label(target: str, row: Path) -> None:
    for verb in (["lookup", "--feature", "user=3"], ["predict", "--input", row]):
        error = run_json(*verb, "--target", target, "--label", "nightly", code=2)["error"]
        assert error["type"] == "NotFoundError" and "'nightly'" in error["message"], error


def test_a_label_and_a_version_exclude_each_other(target: str, row: Path) -> None:
    for verb in (["lookup", "--feature", "user=3"], ["predict", "--input", row]):
        error = run_json(*verb, "--target", target, "--label", "canary", "--version", "8", code=2)["error"]
        assert error["type"] == "InputError" and "expected one of them" in error["message"], error
