"""Planning by the command line: pictures, measured hardware, memory that does not suffice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.checkpoint import save_checkpoint
from recinfer.distributed.quant import measure
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=100 * (i + 1), embedding_dim=8, feature_names=[f"f{i}"])
        for i in range(4)
    ]
    torch.manual_seed(0)
    model = DLRM(EmbeddingBagCollection(tables=tables), 3, [8, 8], [8, 1])
    return save_checkpoint(tmp_path_factory.mktemp("plan") / "model.ckpt", model)


def test_the_same_model_gives_the_same_plan(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, "--out", tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_picture_of_the_plan(checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    options = ["--world-size", 3, "--out", tmp_path / "plan.json", "--plot", picture]
    run_json("plan", "--checkpoint", checkpoint, *options)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_kind_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--world-size", 3, "--out", tmp_path / "plan.json", "--plot", tmp_path / "plan.txt"]
    error = run_json("plan", "--checkpoint", checkpoint, *options, code=2)["error"]
    assert "plan.txt" in error["message"]
    assert "png" in error["message"]
    assert not (tmp_path / "plan.json").exists()


def test_error_when_tables_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--world-size", 2, "--device", "cuda", "--hbm-gb", 0.000001, "--ddr-gb", 0.000001]
    error = run_json("plan", "--checkpoint", checkpoint, *options, "--out", tmp_path / "plan.json", code=2)["error"]
    assert error["type"] == "PlannerError"
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_counts_the_strings_and_ids_of_vocabularies(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("".join(f"name {n}\n" for n in range(50)))
    np.save(tmp_path / "ids.npy", np.arange(299) - 7)
    options = ["--vocabulary", f"f1={tmp_path / 'names.txt'}", "--vocabulary", f"f2={tmp_path / 'ids.npy'}"]
    run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, *options, "--out", tmp_path / "plan.json")
    tables = json.loads((tmp_path / "plan.json").read_text())["tables"]
    found = {table["table"]: table["estimates"].get("index_bytes") for table in tables}
    assert found == {"t0": None, "t1": 16 * 50, "t2": 16 * 299, "t3": None}


def test_precision_by_table(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--precision", "fp16", "--table-precision", "t1=int4", "--table-precision", "t2=fp32"]
    run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, *options, "--out", tmp_path / "plan.json")
    found = run_json("inspect", tmp_path / "plan.json")
    assert {t["name"]: t["precision"] for t in found["tables"]} == {
        "t0": "fp16",
        "t1": "int4",
        "t2": "fp32",
        "t3": "fp16",
    }


def test_unknown_table_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--table-precision", "t9=int4", "--out", tmp_path / "plan.json"]
    code, _, err = run("plan", "--checkpoint", checkpoint, "--world-size", 2, *options)
    assert code == 2
    assert "t9" in err


def test_measured_hardware_changes_the_estimates(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_SET_BYTES", measure._SET_BYTES[:2])  # half a thousand figures, once each
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    hardware = tmp_path / "hardware.json"
    measured = run_json("calibrate", "--out", hardware, "--seconds-per-point", 0.001)
    assert json.loads(hardware.read_text())["device"] == measured["device"] == "cpu"
    plans = {}
    for name, options in (("typical", []), ("measured", ["--hardware", hardware])):
        out = tmp_path / f"{name}.json"
        plans[name] = run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, *options, "--out", out)
    assert plans["typical"]["estimates"]["max_perf_ms"] != plans["measured"]["estimates"]["max_perf_ms"]


@pytest.mark.parametrize("verb", ["export", "reshard", "train"])
def test_a_malformed_plan_is_one_sentence(exported: Exported, tmp_path: Path, verb: str) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    data = json.loads((exported.archive / "plan.json").read_text())
    del data["hash"]
    shard = data["tables"][0]["shards"][0]
    options = {
        "export": ["--checkpoint", exported.archive.parent / "tiny.ckpt"],
        "reshard": [exported.archive],
        "train": ["--world-size", 2],
    }[verb]
    for text, message in (
        ("", "the plan is not acceptable JSON"),
        ("[" * 100_000, "the plan is nested deeper than"),
        ("[]", "the plan holds a list; expected one JSON object"),
        ('{"a": 1}', "of format None; expected a plan"),
        (json.dumps({**data, "world_size": None}), "plan.world_size: got None; expected an integer"),
        (json.dumps({**data, "world_size": 1 << 40}), "world_size 1099511627776; expected 1 to 65536"),
        (json.dumps({**data, "estimates": [1]}), "plan.estimates: got [1]; expected an object"),
        (json.dumps({**data, "tables": {"t": 1}}), "expected a list"),
        (
            json.dumps(data).replace(json.dumps(shard), "[0, 0, 50, 0, 8.5]", 1),
            "plan.tables[0].shards[0][4]: got 8.5; expected an integer",
        ),
    ):
        plan.write_text(text)
        code, said, err = run(verb, *options, "--plan", plan, "--out", out)
        assert (code, said) == (2, ""), err
        (line,) = [line for line in err.splitlines() if not line.startswith("rows: ")]
        assert line.startswith(f"error: {plan}: ") and message in line
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
