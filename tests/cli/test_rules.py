"""Errors that cite a rule of a file format say once which file of the installed package defines it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer

import recinfer
from recinfer.cli.console import verb
from recinfer.errors import ArchiveError
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json

FORMATS = Path(recinfer.__file__).parent / "archive"


@pytest.mark.parametrize(("rule", "file"), [("C2", "FORMAT.md"), ("F1", "FORMAT.md"), ("X6", "DELTA.md")])
def test_the_file_defines_the_rule(capsys: pytest.CaptureFixture[str], rule: str, file: str) -> None:
    def fail() -> None:
        raise ArchiveError("something is wrong", rule=rule)

    with pytest.raises(typer.Exit):
        verb(fail)()
    assert capsys.readouterr().err == f"error: [{rule}] something is wrong (rule {rule}: see {FORMATS / file})\n"
    assert f"- **{rule}** " in (FORMATS / file).read_text()


def test_every_rule_is_in_the_file_that_is_named() -> None:
    for file, letters in (("FORMAT.md", "FJMPSDC"), ("DELTA.md", "X")):
        assert all(f"- **{letter}1** " in (FORMATS / file).read_text() for letter in letters)


def test_folder_that_is_not_an_archive(tmp_path: Path) -> None:
    code, _, err = run("inspect", tmp_path)
    assert code == 2
    assert err.count(str(FORMATS / "FORMAT.md")) == 1
    assert str(FORMATS / "FORMAT.md") in run_json("inspect", tmp_path, code=2)["error"]["message"]


def test_verify_says_it_under_its_problems(exported: Exported, tmp_path: Path) -> None:
    shutil.copytree(exported.archive, tmp_path / "a.rqa")
    (tmp_path / "a.rqa" / "stray").touch()
    code, out, _ = run("verify", tmp_path / "a.rqa")
    assert code == 1
    assert "[F6] 'stray' is not listed" in out
    assert f"rule F6: see {FORMATS / 'FORMAT.md'}" in "".join(out.split("\n"))


def test_a_checkpoint_is_no_archive_and_an_archive_no_checkpoint(exported: Exported, tmp_path: Path) -> None:
    message = run_json("verify", exported.archive.with_name("tiny.ckpt"), code=2)["error"]["message"]
    assert "is a checkpoint, not an archive; `recinfer export` makes one of it" in message
    arguments = "--checkpoint", exported.archive, "--world-size", 2, "--out", tmp_path / "plan.json"
    assert "is an archive; give the checkpoint" in run_json("plan", *arguments, code=2)["error"]["message"]


def test_an_error_that_a_process_explained_is_not_explained_again(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ArchiveError(f"the server did not start: wrong (rule F1: see {FORMATS / 'FORMAT.md'})", rule="F1")

    with pytest.raises(typer.Exit):
        verb(fail)()
    assert capsys.readouterr().err.count("FORMAT.md") == 1
