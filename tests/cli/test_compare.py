"""``recinfer export --reference`` and ``recinfer compare``: exit codes, what they print, and that no archive is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.checkpoint import save_checkpoint
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json
from tests.serving.conftest import build_model, make_request

ROWS = 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, ``right.npz`` with its outputs, ``wrong.npz`` with those of another model's weights."""
    folder = tmp_path_factory.mktemp("recorded")
    save_checkpoint(folder / "tiny.ckpt", build_model(), model_name="tiny", model_version="3")
    dense, features = make_request(5, ROWS)
    arrays = {"dense": dense.numpy()}
    for key in features.keys():  # noqa: SIM118 - not a dict
        arrays[f"{key}.values"] = features[key].values().numpy()
        arrays[f"{key}.lengths"] = features[key].lengths().numpy()
    with torch.no_grad():
        for name, seed in (("right", 0), ("wrong", 1)):
            np.savez(folder / f"{name}.npz", **arrays, output=build_model(seed).eval()(dense, features).numpy())
    return folder


def export(files: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("export", "--checkpoint", files / "tiny.ckpt", "--out", out, *more)


def test_a_reference_that_agrees(files: Path, tmp_path: Path) -> None:
    found = run_json(*export(files, tmp_path / "a.rqa", "--reference", files / "right.npz"))["report"]["reference"]
    assert (found["ok"], found["model"], found["rows"], found["num_wrong"]) == (True, "float", ROWS, 0)
    assert found["max_difference"] < 1e-5 < found["archive_difference"]
    found = run_json("compare", tmp_path / "a.rqa", "--reference", files / "right.npz")
    assert (found["ok"], found["model"], found["wrong"]) == (True, "archive", [])
    code, out, _ = run("compare", tmp_path / "a.rqa", "--reference", files / "right.npz")
    assert code == 0
    assert out.startswith(f"reference right.npz: {ROWS} of {ROWS} rows agree")


def test_a_reference_that_does_not_agree_leaves_no_archive(files: Path, tmp_path: Path) -> None:
    code, out, err = run(*export(files, tmp_path / "b.rqa", "--reference", files / "wrong.npz"))
    assert code == 1
    assert list(tmp_path.iterdir()) == []
    (head,) = [line for line in out.splitlines() if "recorded" in line and "bound" in line]
    assert [word in head for word in ("row", "output", "float model", "difference")] == [True] * 4
    assert "pooled.values()" in err
    assert "No archive was written" in err
    found = run_json(*export(files, tmp_path / "b.rqa", "--reference", files / "wrong.npz"), code=1)
    assert found["error"]["type"] == "MismatchError"
    assert found["reference"]["num_wrong"] == ROWS
    assert set(found["reference"]["wrong"][0]) == {"row", "output", "recorded", "found", "difference", "bound"}


def test_compare_says_which_rows(files: Path, exported: Exported) -> None:
    found = run_json("compare", exported.archive, "--reference", files / "wrong.npz", code=1)
    assert found["ok"] is False
    assert found["num_wrong"] > ROWS // 2
    code, out, _ = run("compare", exported.archive, "--reference", files / "wrong.npz")
    assert code == 1
    assert "torch.cat([pooled[name] for name in NAMES], dim=1)" in " ".join(out.split())


def test_compare_that_proves_little_has_its_own_exit_code(files: Path, tmp_path: Path) -> None:
    """INT2 explains more than the outputs are apart."""
    run_json(
        "plan",
        "--checkpoint",
        files / "tiny.ckpt",
        "--world-size",
        1,
        "--precision",
        "int2",
        "--out",
        tmp_path / "plan.json",
    )
    run_json(*export(files, tmp_path / "narrow.rqa", "--plan", tmp_path / "plan.json"))
    found = run_json("compare", tmp_path / "narrow.rqa", "--reference", files / "right.npz", code=3)
    assert (found["ok"], found["num_wrong"], found["blunt"]) == (False, 0, ["output"])
    code, out, _ = run("compare", tmp_path / "narrow.rqa", "--reference", files / "right.npz")
    assert (code, "proves little for output" in " ".join(out.split())) == (3, True)
    _, told, _ = run("compare", "--help")
    assert "3: all rows agree, but the tolerance is wider" in " ".join(told.replace("│", " ").split())


def test_without_a_reference_export_says_so(files: Path, tmp_path: Path) -> None:
    code, out, _ = run(*export(files, tmp_path / "c.rqa"))
    assert code == 0
    assert "compared only with the float model that was exported" in " ".join(out.split())
    assert run_json(*export(files, tmp_path / "d.rqa"))["report"]["reference"] is None


def test_a_file_that_cannot_be_read_is_refused_before_anything_is_written(files: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    code, _, err = run(*export(files, tmp_path / "e.rqa", "--reference", tmp_path / "bad.npz"))
    assert (code, "cannot be read as an .npz" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.npz"]
