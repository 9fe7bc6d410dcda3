"""With ``--json`` stdout has only valid JSON, whatever the numbers; errors name the missing extra."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from rich.table import Table

from recinfer.cli.console import Output, styled, verb
from recinfer.errors import ConfigError


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).finish({"auc": float("nan"), "more": [1.5, (float("inf"), {"x": float("-inf")})]})
    assert json.loads(capsys.readouterr().out) == {"auc": None, "more": [1.5, [None, {"x": None}]]}


def test_text_for_people_goes_to_stderr_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, False):
        output = Output(as_json)
        output.show("a table")
        output.note("progress")
        output.finish({"done": True})
        out, err = capsys.readouterr()
        assert ("a table" in err, "a table" in out) == (as_json, not as_json)
        assert "progress" in err
        assert out.splitlines()[-1:] == (['{"done": true}'] if as_json else ["a table"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_server_goes_on_where_its_text_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        server, other = Output(as_json=False, must_write=False), Output(as_json=False)
        for write in (Output.show, Output.note):
            write(server, "serving")
            with pytest.raises(OSError, match="No space left"):
                write(other, "a table")


@pytest.mark.parametrize("name", ["tags[/b]", "model[v2]", "lag:100:days"])
def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], name: str) -> None:
    table = Table(f"column {name}", title=f"title {name}")
    table.add_row(f"cell {name}")
    output = Output(as_json=False)
    output.show(table, f"text {name}", styled("green", "wrote", f" {name}.rqa"))
    output.note(f"note {name}")
    out, err = capsys.readouterr()
    assert [found for found in ("column", "title", "cell", "text", "wrote") if f"{found} {name}" not in out] == []
    assert err == f"note {name}\n"


def test_an_error_is_one_line_even_if_its_message_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ConfigError("one\n  two [x] three " + "and more " * 40 + "end")

    with pytest.raises(typer.Exit) as caught:
        verb(fail)()
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "error: one two [x] three " + "and more " * 40 + "end\n"


def test_a_missing_package_names_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")

    with pytest.raises(typer.Exit):
        verb(fail)()
    assert "pip install 'recinfer[onnx]'" in capsys.readouterr().err


def test_a_file_where_a_folder_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    with pytest.raises(typer.Exit):
        verb(lambda: (tmp_path / "text").mkdir(exist_ok=True))()
    assert "text exists and is not a folder; choose another path" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'recinfer.nothing'", name="recinfer.nothing")

    with pytest.raises(ModuleNotFoundError):
        verb(fail)()
