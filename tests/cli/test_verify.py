"""``recinfer verify`` of an archive at a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Exported
from tests.e2e.commands import run_json


def test_an_archive_at_a_url(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECINFER_CACHE", str(tmp_path / "cache"))
    url = exported.archive.as_uri()
    found = run_json("verify", url)
    assert (found["archive"], found["ok"], found["model"]) == (url, True, "tiny")
