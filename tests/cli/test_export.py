"""``recinfer export --missing-shards``: what it writes, what ``inspect`` shows and what ``reshard`` keeps."""

from __future__ import annotations

import json
from pathlib import Path

from recinfer.archive.reader import open_archive
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json


def in_manifest(archive: Path) -> str | None:
    """The value in the manifest; None if it lacks the key."""
    return json.loads((archive / "manifest.json").read_text()).get("missing_shards")


def test_default_rows_are_in_the_archive_and_inspect_says_so(exported: Exported) -> None:
    assert exported.said["missing_shards"] == "default_rows"
    assert in_manifest(exported.archive) == "default_rows"
    assert open_archive(exported.archive).manifest.missing_shards == "default_rows"
    assert run_json("inspect", exported.archive)["missing_shards"] == "default_rows"
    code, out, _ = run("inspect", exported.archive)
    (line,) = [line for line in out.splitlines() if "missing shards" in line]
    assert (code, "default rows instead, flagged" in line) == (0, True)


def test_reshard_keeps_exports_choice_unless_an_option_changes_it(exported: Exported, tmp_path: Path) -> None:
    def reshard(name: str, *more: object) -> Path:
        run_json("reshard", exported.archive, "--world-size", 1, "--out", tmp_path / name, *more)
        return tmp_path / name

    assert in_manifest(reshard("kept.rqa")) == "default_rows"
    refusing = reshard("refusing.rqa", "--missing-shards", "error")
    assert in_manifest(refusing) is None, "as archives were before there was the key"
    assert run_json("inspect", refusing)["missing_shards"] == "reject"
    assert "missing shards" not in run("inspect", refusing)[1]


def test_what_a_missing_shard_means_is_changed_by_itself(exported: Exported, tmp_path: Path) -> None:
    """By the command that a ranker's error suggests when it may not answer with default rows."""
    done = run_json("reshard", exported.archive, "--missing-shards", "error", "--out", tmp_path / "a.rqa")
    assert in_manifest(tmp_path / "a.rqa") is None
    before = run_json("inspect", exported.archive)
    assert (done["world_size"], done["plan_hash"]) == (before["world_size"], before["plan_hash"])
    assert run("reshard", exported.archive, "--out", tmp_path / "b.rqa")[0] == 2


def test_invalid_choice_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    out = tmp_path / "none.rqa"
    code, _, err = run("export", "--checkpoint", tmp_path, "--out", out, "--missing-shards", "default_rows")
    assert code == 2
    assert "'default-rows'" in err
    assert "'error'" in err
    assert not out.exists()
