"""export, inspect, the start of serve and the status say which engine runs the dense part, and why it is torch."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.inference.predictor import load
from tests.archive.models import Everything
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json
from tests.warm import RECINFER, Program

REASON = "the ONNX export failed: "


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """An archive whose dense part ONNX cannot express, and what export printed for it, as JSON and as text."""
    folder = tmp_path_factory.mktemp("by_torch")
    torch.save(Everything().state_dict(), folder / "weights.pt")
    options = ["--checkpoint", folder / "weights.pt", "--model", "tests.archive.models:Everything", "--out"]
    code, out, err = run("export", *options, folder / "people.rqa")
    assert code == 0, err
    return folder / "a.rqa", run_json("export", *options, folder / "a.rqa", "--name", "every"), " ".join(out.split())


def test_torch_and_why(by_torch: tuple[Path, dict[str, Any], str]) -> None:
    archive, said, text = by_torch
    line = f"the dense part runs on torch, which is slower than onnxruntime, because {REASON}"
    assert line in text
    for found in (said, run_json("inspect", archive)):
        assert found["engine"] == "torch"
        assert found["engine_reason"].startswith(REASON)
    assert f"runs on torch, which is slower than onnxruntime, because {REASON}" in " ".join(
        run("inspect", archive)[1].split()
    )
    with Program(RECINFER, "serve", archive, "--port", 0, "--metrics-port", 0) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[2].startswith(
            f"the dense part of every 1 runs on torch, which is slower than onnxruntime, because {REASON}"
        )
        with urllib.request.urlopen(lines[1].split()[-1] + "status.json", timeout=60) as answer:
            (model,) = json.loads(answer.read())["models"]
        assert model["engine"] == "torch"
        assert model["engine_reason"].startswith(REASON)
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_onnxruntime(exported: Exported) -> None:
    for found in (exported.said, run_json("inspect", exported.archive)):
        assert (found["engine"], found["engine_reason"]) == ("onnxruntime", None)
    assert "runs on onnxruntime" in run("inspect", exported.archive)[1]


def test_reason_is_the_users_choice_of_torch(exported: Exported) -> None:
    assert load(exported.archive).engine_reason is None
    assert load(exported.archive, dense_engine="torch").engine_reason == "it was loaded with dense_engine='torch'"
