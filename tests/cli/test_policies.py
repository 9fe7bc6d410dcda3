"""``recinfer export --missing`` and ``--out-of-range``: what they write, what ``inspect`` shows, what callers get."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from recinfer.inference.predictor import load
from recinfer.serving.server.server import Server
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json


def export(exported: Exported, out: Path, *options: str) -> tuple[int, str, str]:
    checkpoint = exported.archive.parent / "tiny.ckpt"
    return run("export", "--checkpoint", checkpoint, "--out", out, *options)


def test_archive_holds_the_policies_and_inspect_shows_them(exported: Exported, tmp_path: Path) -> None:
    options = [
        "--missing",
        "*=empty",
        "--missing",
        "user=reject",
        "--missing",
        "item=3",
        "--out-of-range",
        "shop=default",
    ]
    code, _, err = export(exported, tmp_path / "told.rqa", *options)
    assert code == 0, err
    expected = {
        "user": ("reject", "reject"),
        "item": (3, "reject"),
        "history": ("empty", "reject"),
        "shop": ("empty", "default_row"),
    }
    for said in (
        json.loads((tmp_path / "told.rqa/manifest.json").read_text()),
        run_json("inspect", tmp_path / "told.rqa"),
    ):
        assert {f["name"]: (f["missing"], f["out_of_range"]) for f in said["features"]} == expected
    lines = run("inspect", tmp_path / "told.rqa")[1].splitlines()
    (head,) = [at for at, line in enumerate(lines) if "missing in Predict" in line and "id out of range" in line]
    shown = [re.split(" {2,}", line.strip()) for line in lines[head + 2 : head + 6]]
    assert shown == [
        ["reject", "reject", "user"],
        ["id 3", "reject", "item"],
        ["empty", "reject", "history"],
        ["empty", "row 0", "shop"],
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--missing", "shop"], "--missing 'shop': expected FEATURE=empty, FEATURE=reject or FEATURE=ID"),
        (["--missing", "shops=empty"], "missing: the model has no feature 'shops'; its features are user, item"),
        (
            ["--missing", "shop=zero"],
            "missing: got 'zero' for feature 'shop'; expected 'empty', 'reject' or an id below 30",
        ),
        (["--missing", "shop=30"], "missing: got 30 for feature 'shop'"),
        (["--out-of-range", "shop=clip"], "out_of_range: got 'clip' for feature 'shop'"),
    ],
)
def test_other_words_are_refused(exported: Exported, tmp_path: Path, options: list[str], said: str) -> None:
    code, _, err = export(exported, tmp_path / "none.rqa", *options)
    assert code == 2
    assert said in " ".join(err.split())
    assert not (tmp_path / "none.rqa").exists()


def test_predict_says_which_features_are_missing(exported: Exported, tmp_path: Path) -> None:
    features = {"user": [[1]], "item": [[2]], "shop": [[]]}
    body = {"dense": torch.zeros(1, 3).tolist(), "features": features}
    (tmp_path / "ids.json").write_text(json.dumps(body))
    with Server({"tiny": load(exported.archive)}) as server:
        asked = ["predict", "--target", server.target, "--input", tmp_path / "ids.json"]
        code, _, err = run(*asked)
        said = " ".join(err.split())
        assert code == 2 and "missing features: 'history'; got user, item, shop. Predict needs all features:" in said
        (tmp_path / "ids.json").write_text(json.dumps({**body, "features": features | {"history": [[]]}}))
        assert run_json(*asked)["rows"] == 1
