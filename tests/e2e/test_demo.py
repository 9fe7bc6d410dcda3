"""The whole demo, on synthetic rows and on the real samples if they are present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recinfer.serving import server_process
from tests.e2e.commands import run_json
from tests.warm import run_program, starting_warm, warm_workers


def demo(*args: object) -> tuple[dict[str, Any], str]:
    """What ``recinfer demo --json`` printed last, and what it printed for people: a process of its own, as its server is."""
    code, out, err = run_program(warm_workers(), "demo", "--json", *args)
    assert code == 0, err
    return json.loads(out), err


def test_made_up_rows(tmp_path: Path) -> None:
    report, shown = demo("--limit", 4000, "--out", tmp_path / "kept")
    assert report["rows"] == {"train": 3600, "test": 400}
    assert 0.55 < report["quality"]["float"]["auc"] < 1
    assert report["auc_difference"] < 0.005
    assert report["max_logit_difference"] < 0.1
    assert 0 < report["bytes"]["archive"] < report["bytes"]["checkpoint"]
    assert {(entry["call"], entry["batch"]) for entry in report["latency_seconds"]} == {
        ("lookup", 1),
        ("lookup", 32),
        ("predict", 1),
        ("predict", 32),
    }
    assert all(0 < entry["p50"] <= entry["p99"] for entry in report["latency_seconds"])
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["model.ckpt", "model.rqa", "plan.json"]
    for what in ("t_C26", "AUC", "log-loss", "fp32 checkpoint", "p99"):
        assert what in shown
    with starting_warm(server_process):
        report = run_json("demo", "--limit", 1000, "--out", tmp_path / "kept")  # the same folder again
    assert report["rows"] == {"train": 900, "test": 100}


def test_managed_collisions_are_compared_exported_and_served() -> None:
    with starting_warm(server_process):
        report = run_json("demo", "--limit", 600, "--world-size", 1, "--vocabulary", "managed")
    assert [found["name"] for found in report["vocabularies"]] == ["full", "hashed", "managed"]
    assert report["quality"]["float"]["auc"] == pytest.approx(report["vocabularies"][2]["auc"], abs=1e-5)
    assert report["max_logit_difference"] < 0.1


def test_criteo_sample(sample_data: Path) -> None:
    with starting_warm(server_process):
        report = run_json("demo", "--data", sample_data / "criteo_sample.csv", "--format", "criteo")
    assert report["rows"] == {"train": 180, "test": 20}
    assert report["max_logit_difference"] < 0.1


@pytest.mark.slow
def test_movielens_loses_nothing_to_int8(sample_data: Path) -> None:
    with starting_warm(server_process):
        report = run_json("demo", "--data", sample_data / "ml-100k.inter", "--format", "movielens")
    assert report["rows"] == {"train": 90_000, "test": 10_000}
    assert report["quality"]["float"]["auc"] > 0.75
    assert report["auc_difference"] < 0.001
