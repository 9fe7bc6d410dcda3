"""``recinfer inspect``: its tables fit a terminal of 80 columns."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from recinfer.archive.reader import open_archive
from recinfer.cli.inspect import archive_tables
from tests.cli.conftest import Exported


def test_names_are_whole_in_80_columns(exported: Exported) -> None:
    manifest = open_archive(exported.archive).manifest
    console = Console(file=StringIO(), width=80)
    console.print(*archive_tables(manifest))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    words = set(shown.replace(",", " ").split())
    expected = {word for t in manifest.tables for word in (t.name, *t.features, t.sharding, t.precision, t.pooling)}
    assert expected - words == set()
    assert "…" not in shown.split("raw rows")[1]
