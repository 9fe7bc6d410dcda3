"""``recinfer predict`` with ids as JSON: every field of the body is sent, or is an error."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.checkpoint import save_checkpoint
from recinfer.data.contract import DenseFeature, FeatureContract, Hash, SparseFeature
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.server.server import Server
from tests.cli.conftest import Exported
from tests.e2e.commands import run_json
from tests.serving.conftest import NUM_DENSE, build_model, export

DENSE = [[0.5, 1.0, -2.0], [0.0, 0.25, 3.0], [1.0, 1.0, 1.0]]
CANDIDATES = {"item": [[5], [], [7]], "history": [[], [1, 2], [3]], "shop": [[4], [6], [8]]}
TOGETHER = {"dense": DENSE, "features": {**CANDIDATES, "user": [[3, 9]] * 3}}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return load(export(build_model(5), tmp_path_factory.mktemp("other"), "other", "8"))


@pytest.fixture(scope="module")
def target(exported: Exported, other: Predictor) -> Iterator[str]:
    with Server({"tiny": load(exported.archive), "other": other}) as server:
        yield server.target


def predict(target: str, path: Path, body: dict[str, Any], *options: object, code: int = 0) -> dict[str, Any]:
    """What ``recinfer predict --json`` prints for ``body``."""
    path = path / "ids.json"
    path.write_text(json.dumps(body))
    return run_json("predict", "--target", target, "--timeout", 60, "--input", path, *options, code=code)


@pytest.mark.parametrize("batch_size", [1, 2, 1024])
def test_a_context_counts_as_features_of_every_row_do(target: str, tmp_path: Path, batch_size: int) -> None:
    expected = predict(target, tmp_path, TOGETHER)["outputs"]
    without = predict(target, tmp_path, {"dense": DENSE, "features": {**CANDIDATES, "user": [[]] * 3}})["outputs"]
    body = {"dense": DENSE, "features": CANDIDATES, "context": {"user": [[3, 9]]}}
    found = predict(target, tmp_path, body, "--batch-size", batch_size)["outputs"]
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values))
        assert not torch.equal(torch.tensor(without[name]), torch.tensor(values))


def test_packed_files_are_read_and_written(target: str, tmp_path: Path) -> None:
    expected = predict(target, tmp_path, TOGETHER, "--out", tmp_path / "plain.csv")["outputs"]
    path, out = tmp_path / "ids.json.gz", tmp_path / "out.csv.gz"
    path.write_bytes(gzip.compress((tmp_path / "ids.json").read_bytes()))
    found = run_json("predict", "--target", target, "--timeout", 60, "--input", path, "--out", out)
    assert found["outputs"] == expected
    assert gzip.decompress(out.read_bytes()) == (tmp_path / "plain.csv").read_bytes()
    path.write_bytes(path.read_bytes()[:-9])
    said = run_json("predict", "--target", target, "--timeout", 60, "--input", path, code=2)["error"]
    assert said["type"] == "InputError" and "ids.json.gz: the compressed data is cut off" in said["message"]


def test_a_context_of_several_samples_is_refused(target: str, tmp_path: Path) -> None:
    body = {"dense": DENSE, "features": CANDIDATES, "context": {"user": [[3], [9], [1]]}}
    error = predict(target, tmp_path, body, code=2)["error"]
    assert (error["type"], "context" in error["message"]) == ("InputError", True), error


def test_body_selects_model_and_version(target: str, tmp_path: Path) -> None:
    expected = predict(target, tmp_path, TOGETHER, "--model", "other")["outputs"]
    assert expected != predict(target, tmp_path, TOGETHER)["outputs"]
    for named in ({"model": "other"}, {"model": "other", "version": "8"}, {"version": "8"}):
        options = [] if "model" in named else ["--model", "other"]
        assert predict(target, tmp_path, {**TOGETHER, **named}, *options)["outputs"] == expected
    assert predict(target, tmp_path, {**TOGETHER, "model": "other"}, "--model", "other")["outputs"] == expected


def test_error_names_an_unknown_model_or_version(target: str, tmp_path: Path) -> None:
    for named, said in (({"model": "nonsense"}, "'nonsense'"), ({"version": "99"}, "'99'")):
        error = predict(target, tmp_path, {**TOGETHER, **named}, code=2)["error"]
        assert (error["type"], said in error["message"]) == ("NotFoundError", True), error


def test_a_body_and_an_option_that_name_different_models_are_refused(target: str, tmp_path: Path) -> None:
    error = predict(target, tmp_path, {**TOGETHER, "model": "other"}, "--model", "tiny", code=2)["error"]
    assert error["type"] == "ConfigError"
    assert "--model" in error["message"] and "'other'" in error["message"] and "'tiny'" in error["message"]


def test_the_file_of_scores_reads_back_as_the_same_float32(target: str, tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    found = predict(target, tmp_path, TOGETHER, "--out", out)["outputs"]
    written = list(csv.DictReader(out.open()))
    for name, values in found.items():
        rows = [[float(text) for text in row[name].split()] for row in written]
        assert torch.equal(torch.tensor(rows).reshape(-1), torch.tensor(values).reshape(-1))


@pytest.fixture(scope="module")
def raw_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose archive has a feature contract of the columns user, item, history, shop, d0, d1 and d2."""
    folder = tmp_path_factory.mktemp("raw")
    sparse = tuple(SparseFeature(name, Hash(30)) for name in ("user", "item", "history", "shop"))
    contract = FeatureContract(sparse, tuple(DenseFeature(f"d{i}") for i in range(NUM_DENSE)))
    checkpoint = save_checkpoint(folder / "tiny.ckpt", build_model(), contract=contract)
    run_json("export", "--checkpoint", checkpoint, "--out", folder / "tiny.rqa")
    with Server({"tiny": load(folder / "tiny.rqa")}) as server:
        yield server.target


def test_a_file_of_raw_rows_without_a_row_is_refused(raw_target: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user,item,history,shop,d0,d1,d2\n")
    said = run_json("predict", "--target", raw_target, "--input", tmp_path / "rows.csv", code=2)
    assert "got no rows, expected at least one" in said["error"]["message"]


USERS = {"user": "u7", "history": "h1", "d1": 0.5}
CANDIDATE_ROWS = [("a", "x", "1", "2"), ("b", "", "0.25", ""), ("c", "y", "", "-1")]  # item, shop, d0, d2


def raw(target: str, folder: Path, table: str, context: object = None, code: int = 0) -> dict[str, Any]:
    """What ``recinfer predict --json`` prints for raw rows, with a shared row."""
    (folder / "rows.csv").write_text(table)
    (folder / "user.json").write_text(json.dumps(context))
    options = () if context is None else ("--context", folder / "user.json")
    command = ("predict", "--target", target, "--timeout", 60, "--input", folder / "rows.csv", "--batch-size", 2)
    return run_json(*command, *options, code=code)


def lines(*rows: tuple[str, ...]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


def test_a_raw_context_counts_as_columns_of_every_row_do(raw_target: str, tmp_path: Path) -> None:
    header, shared = ("item", "shop", "d0", "d2"), tuple(map(str, USERS.values()))
    whole = lines((*header, *USERS), *((*row, *shared) for row in CANDIDATE_ROWS))
    expected = raw(raw_target, tmp_path, whole)
    assert raw(raw_target, tmp_path, lines(header, *CANDIDATE_ROWS), USERS) == expected
    assert raw(raw_target, tmp_path, whole, {}) == expected
    number = {"user": 7, "history": None, "d1": None}  # as CSV has them: 7 and two empty cells
    missing = lines((*header, *number), *((*row, "7", "", "") for row in CANDIDATE_ROWS))
    assert raw(raw_target, tmp_path, lines(header, *CANDIDATE_ROWS), number) == raw(raw_target, tmp_path, missing)


def test_a_raw_context_may_hold_all_columns_with_ids(raw_target: str, tmp_path: Path) -> None:
    ids, numbers = {"user": "u7", "item": "a", "history": "h1", "shop": "x"}, [("1", "2", "3"), ("0", "0", "")]
    header = ("d0", "d1", "d2")
    expected = raw(raw_target, tmp_path, lines((*header, *ids), *((*row, *ids.values()) for row in numbers)))
    assert raw(raw_target, tmp_path, lines(header, *numbers), ids) == expected


@pytest.mark.parametrize(
    ("context", "says"),
    [
        ({**USERS, "item": "a"}, "column 'item' is also in the rows"),
        ({"user": "u7", "history": "h1"}, "'d1'"),
        ({**USERS, "d1": "many"}, "context: column 'd1'"),
        ({**USERS, "user": ["u7", "u8"]}, "context: column 'user': holds values of type list"),
        ({**USERS, "item": "a", "shop": "x", "d0": 1, "d2": 2}, "context: column 'item' is also in the rows"),
        ([USERS], "got list, expected an object"),
    ],
)
def test_a_raw_context_that_does_not_fit(raw_target: str, tmp_path: Path, context: object, says: str) -> None:
    said = raw(raw_target, tmp_path, lines(("item", "shop", "d0", "d2"), *CANDIDATE_ROWS), context, code=2)
    assert says in said["error"]["message"]
