"""What commands show on a terminal, and not in a pipe."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from recinfer.checkpoint import save_checkpoint
from recinfer.cli import admin, bench
from recinfer.printed import slim_table
from recinfer.serving.bench import LoadResult
from recinfer.serving.client.admin import LoadedVersion
from recinfer.sizing.deployment import Deployment
from recinfer.sizing.hosts import HostType
from recinfer.sizing.report import COLUMNS, rows
from tests.serving.conftest import build_model
from tests.warm_shell import warm_tools


def shown_on_a_terminal(columns: int, *arguments: object) -> str:
    """What ``recinfer`` with these arguments prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [str(warm_tools() / "recinfer"), *map(str, arguments)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = ""
        with contextlib.suppress(OSError):  # the end, on Linux
            while part := os.read(ours, 65536).decode(errors="replace"):
                shown += part
    os.close(ours)
    assert process.returncode == 0, shown
    return shown


def test_a_terminal_of_80_columns_shows_what_takes_long_and_whole_numbers(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "tiny.ckpt", build_model())
    shown = shown_on_a_terminal(80, "export", "--checkpoint", checkpoint, "--out", tmp_path / "tiny.rqa")
    assert "exporting the dense part" in shown
    table = shown.rpartition("relative")[2].partition("compared")[0]
    assert "t_user" in table and "int8" in table and "…" not in table


def test_a_narrow_terminal_shows_whole_tables(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "tiny.ckpt", build_model())
    shown = shown_on_a_terminal(40, "plan", "--checkpoint", checkpoint, "--world-size", 2, "--out", tmp_path / "p.json")
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("t_user"))
    assert row[3:6] == ["int8", "TW", "quant"]
    assert "…" not in shown


def lines_of(table: Table) -> list[str]:
    """The lines of a table at a terminal's 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_table_without_lines_folds_text_and_keeps_numbers_whole() -> None:
    table = slim_table("name", "text", "number", numbers=("number",), title="a title")
    table.add_row("A" * 40, "Z" * 60, "1,234,567.89")
    shown = "".join(lines_of(table))
    assert "1,234,567.89" in shown
    assert (shown.count("A"), shown.count("Z")) == (40, 60)


def test_tables_of_figures_fit_80_columns() -> None:
    errors = {"DEADLINE_EXCEEDED": 12, "RESOURCE_EXHAUSTED": 34}
    table = bench._table("lookup", [LoadResult(128, 10.0, np.full(1000, 9.87654), errors, 1024)])
    assert "9876.540" in lines_of(table)[3].split()
    host = HostType("c7i.metal-48xl", 192, 384.0, 8.568)
    deployments = [Deployment(host, 128, 100, 100, 9e4, 0.69, math.inf, 0.0123)]
    table = slim_table(*COLUMNS, numbers=COLUMNS[2:])
    for row in rows(deployments):
        table.add_row(*row)
    assert ["110,527.20", "yes"] in [line.split()[-2:] for line in lines_of(table)]


def test_words_of_the_table_of_versions_are_whole_at_80_columns() -> None:
    one = LoadedVersion(0, "a" * 64, 729_000, 0, ("stable",), 60.0, "onnxruntime")
    versions = {"7": one, "8": replace(one, weight=1)}
    shown = lines_of(admin._table({"ctr": versions}))
    assert len(shown) == 4  # one line for each version
    words = {word for line in shown for word in line.split()}
    assert {"onnxruntime", "serving", "stable"} <= words
    assert any(re.fullmatch(r"\d\d-\d\d", word) for word in words)
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d", word) for word in words)
    several = lines_of(admin._table({"ctr": versions, "other": versions}))
    assert "(default)" in {word for line in several for word in line.split()}
