"""Rows to served scores by the command line alone: each verb on what the one before it wrote."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recinfer.cli.lookup import parse_features
from recinfer.data import write_csv
from recinfer.data.dataset import load_dataset
from recinfer.data.synthetic import generate_criteo
from recinfer.distributed.planner import Plan
from recinfer.inference.predictor import load
from recinfer.serving.server_process import served
from tests.e2e.commands import run, run_json
from tests.warm import RECINFER, Program

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Made:
    """A folder with what train, plan and export wrote, and what they said."""

    folder: Path
    trained: dict[str, Any]
    planned: dict[str, Any]
    exported: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "model.ckpt"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def archive(self) -> Path:
        return self.folder / "model.rqa"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("pipeline")
    checkpoint, plan, archive = folder / "model.ckpt", folder / "plan.json", folder / "model.rqa"
    options = ["--format", "synthetic", "--limit", 2000, "--embedding-dim", 8, "--batch-size", 128]
    trained = run_json("train", *options, "--out", checkpoint)
    planned = run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, "--out", plan)
    exported = run_json("export", "--checkpoint", checkpoint, "--plan", plan, "--out", archive)
    return Made(folder, trained, planned, exported)


def at(target: str) -> list[object]:
    """Options of a verb that asks a server which may have no core to itself."""
    return ["--target", target, "--timeout", 60]


@pytest.fixture(scope="module")
def target(made: Made) -> Iterator[str]:
    with served(made.archive) as target:
        yield target


def test_train_says_how_good_the_model_is(made: Made) -> None:
    assert 0.5 < made.trained["auc"] < 1
    assert 0 < made.trained["log_loss"] < math.log(2)
    assert Path(made.trained["checkpoint"]) == made.checkpoint


def test_plan_writes_what_it_says(made: Made) -> None:
    plan = Plan.load(made.plan)
    assert (plan.world_size, plan.hash, len(plan.tables)) == (2, made.planned["plan_hash"], 26)


def test_inspect_a_plan(made: Made) -> None:
    found = run_json("inspect", made.plan)
    assert (found["world_size"], found["plan_hash"]) == (2, made.planned["plan_hash"])
    assert len(found["tables"]) == 26


def test_inspect_an_archive(made: Made) -> None:
    found = run_json("inspect", made.archive)
    assert found["format_version"] == 1
    assert found["precision"] == "int8"
    assert found["world_size"] == 2
    assert found["plan_hash"] == made.planned["plan_hash"] == made.exported["plan_hash"]
    assert {t["name"] for t in found["tables"]} == {f"t_C{i}" for i in range(1, 27)}
    for table in found["tables"]:
        assert table["rows"] > 0
        assert table["dim"] == 8
        assert table["precision"] == "int8"
        assert set(table["ranks"]) <= {0, 1}
        assert table["sharding"] in ("table_wise", "row_wise", "column_wise")
    on_disk = sum(f.stat().st_size for f in made.archive.rglob("*") if f.is_file())
    assert found["bytes_total"] == on_disk - (made.archive / "manifest.json").stat().st_size
    code, out, _ = run("inspect", made.archive)
    assert code == 0
    assert "t_C26" in out


def test_verify(made: Made) -> None:
    assert run_json("verify", made.archive)["ok"] is True


def test_verify_refuses_a_damaged_archive(made: Made, tmp_path: Path) -> None:
    damaged = shutil.copytree(made.archive, tmp_path / "damaged.rqa")
    shard = damaged / "shards/rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    error = run_json("verify", damaged, code=2)["error"]
    assert error["type"] == "ArchiveError"
    assert "shards/rank-00001.safetensors" in error["message"]


def test_a_damaged_archive_is_not_served(made: Made, tmp_path: Path) -> None:
    damaged = shutil.copytree(made.archive, tmp_path / "damaged.rqa")
    (damaged / "plan.json").unlink()
    code, out, err = run("serve", damaged, "--port", 0)
    assert (code, out) == (2, "")
    assert "plan.json" in err


def test_lookup_gives_what_the_predictor_gives(made: Made, target: str) -> None:
    features = ["--feature", "C1=3,7;5", "--feature", "C2=5;"]
    found = run_json("lookup", *at(target), *features)
    expected = load(made.archive).lookup(parse_features(["C1=3,7;5", "C2=5;"]))
    assert set(found["pooled"]) == {"C1", "C2"}
    for name, values in found["pooled"].items():
        assert torch.equal(torch.tensor(values), expected[name])
    assert found["pooled"]["C2"][1] == [0.0] * 8


def test_lookup_says_what_is_wrong_with_an_id(target: str) -> None:
    code, _, err = run("lookup", *at(target), "--feature", "C9=1000000")
    assert code == 2
    assert "C9" in err
    assert "1000000" in err


def test_predict_takes_raw_rows(made: Made, target: str, tmp_path: Path) -> None:
    columns = generate_criteo(50, seed=7).columns
    rows = tmp_path / "rows.csv"
    with rows.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in zip(*columns.values()):
            writer.writerow(["" if isinstance(v, float) and math.isnan(v) else v for v in row])
    scores = tmp_path / "scores.csv"
    found = run_json("predict", *at(target), "--input", rows, "--batch-size", 16, "--out", scores)
    predictor = load(made.archive)
    assert predictor.contract is not None
    expected = predictor.predict(*predictor.contract.apply(columns))
    assert found["rows"] == 50
    for name, values in expected.items():
        np.testing.assert_allclose(found["outputs"][name], values.numpy(), atol=1e-5)
    with scores.open() as file:
        written = list(csv.reader(file))
    assert written[0] == list(expected)
    assert len(written) == 51


def test_predict_takes_ids_as_json(made: Made, target: str, tmp_path: Path) -> None:
    body = {"dense": [[0.5] * 13, [0.1] * 13], "features": {f"C{i}": [[1], [0, 2]] for i in range(1, 27)}}
    (tmp_path / "ids.json").write_text(json.dumps(body))
    found = run_json("predict", *at(target), "--input", tmp_path / "ids.json")
    ids = parse_features([f"C{i}=1;0,2" for i in range(1, 27)])
    expected = load(made.archive).predict(torch.tensor(body["dense"]), ids)
    for name, values in expected.items():
        np.testing.assert_allclose(found["outputs"][name], values.numpy(), atol=1e-5)


def test_served_scores_are_as_good_as_the_trained_model(made: Made, target: str) -> None:
    from recinfer.cli.measure import quality_of, served_logits
    from recinfer.serving.client.client import InferenceClient
    from recinfer.training.batches import Examples

    dataset = load_dataset(None, "synthetic", limit=2000, seed=0)
    held_out = Examples.from_columns(dataset.contract, dataset.take(dataset.test))
    with InferenceClient(target, timeout=60) as client:
        quality = quality_of(held_out.labels.numpy(), served_logits(client, held_out))
    assert abs(quality.auc - made.trained["auc"]) < 0.01
    assert abs(quality.log_loss - made.trained["log_loss"]) < 0.01


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_stops_cleanly(made: Made, signal_number: int) -> None:
    with Program(RECINFER, "serve", made.archive, "--port", "0", "--json") as process:
        ready = json.loads(process.stdout.readline())
        found = run_json("lookup", *at(f"127.0.0.1:{ready['port']}"), "--feature", "C1=1")
        assert found["batch_size"] == 1
        process.send_signal(signal_number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "stopped" in err
    assert "Traceback" not in err


def test_a_server_keeps_the_limits_it_is_given(made: Made) -> None:
    limits = ["--max-samples", "2", "--max-ids", "5", "--max-features", "3", "--reuse-outputs"]
    with Program(RECINFER, "serve", made.archive, "--port", "0", "--json", *limits) as process:
        target = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        assert run_json("lookup", *at(target), "--feature", "C1=1,2,3;4,5")["batch_size"] == 2
        for feature, said in (
            (["C1=1;2;3"], "batch_size: got 3"),
            (["C1=1,2,3,4,5,6"], "6"),
            (["C1=1", "C2=1", "C3=1", "C4=1"], "4"),
        ):
            given = [word for one in feature for word in ("--feature", one)]
            error = run_json("lookup", *at(target), *given, code=2)["error"]
            assert said in error["message"], error
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_export_plans_by_itself(made: Made, tmp_path: Path) -> None:
    archive = tmp_path / "small.rqa"
    options = ["--world-size", 3, "--precision", "fp16", "--table-precision", "t_C3=int4", "--name", "small"]
    run_json("export", "--checkpoint", made.checkpoint, *options, "--version", "7", "--out", archive)
    found = run_json("inspect", archive)
    assert (found["model"], found["version"], found["world_size"]) == ("small", "7", 3)
    assert found["precision"] == "mixed"
    assert {t["name"]: t["precision"] for t in found["tables"]}["t_C3"] == "int4"
    assert {t["name"]: t["precision"] for t in found["tables"]}["t_C4"] == "fp16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world-size", 3], "is a plan for 2 ranks"),
        (["--precision", "int4"], "is a plan for int8"),
        (["--table-precision", "t_C3=int4"], "a plan sets the precisions"),
        (["--table-precision", "t_C3"], "expected TABLE=PRECISION"),
        (["--table-precision", "t_C3=int3"], "unknown data type"),
    ],
)
def test_options_that_contradict_the_plan_are_refused(
    made: Made, tmp_path: Path, options: list[object], said: str
) -> None:
    out = tmp_path / "model.rqa"
    error = run_json("export", "--checkpoint", made.checkpoint, "--plan", made.plan, *options, "--out", out, code=2)
    assert said in error["error"]["message"]
    assert not out.exists()


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    code, _, err = run("plan", "--checkpoint", tmp_path / "none", "--world-size", 2, "--out", tmp_path / "plan.json")
    assert code == 2
    assert "none" in err


def test_a_csv_whose_header_names_the_columns_scores_like_the_whole_file(
    target: str, made: Made, tmp_path: Path
) -> None:
    rows = generate_criteo(20, seed=3).columns
    whole, reordered = tmp_path / "whole.csv", tmp_path / "mine.csv"
    write_csv(whole, rows)
    names = [name for name in rows if name != "label"][::-1]
    write_csv(reordered, {"my_own_key": np.arange(20).astype(str), **{name: rows[name] for name in names}})
    want = run_json("predict", *at(target), "--input", whole, "--format", "criteo")["outputs"]
    for path in (whole, reordered):
        assert run_json("predict", *at(target), "--input", path)["outputs"] == want
    write_csv(reordered, {name: rows[name] for name in names if name != "C7"})
    code, _, err = run("predict", *at(target), "--input", reordered)
    assert code == 2 and "'C7'" in err and "missing" in err
