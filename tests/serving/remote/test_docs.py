"""The commands of docs/tutorials/many-hosts.md run unchanged, on free ports."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import ROOT, run_page, script_of
from tests.ports import free_port


def test_from_one_process_to_many_hosts(tmp_path: Path):
    script, skipped = script_of(ROOT / "docs/tutorials/many-hosts.md")
    ports = {port: str(free_port()) for port in ("8580", "50051", "50081")}
    done = run_page(script + "wait\n", tmp_path, ports)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not skipped and done.stdout.count("C1") >= 4
    # Lines about a server that runs have their times.
    assert re.search(r"^\d{4}-\d\d-\d\d [\d:]{8},\d{3} all shards are there: serving$", done.stderr, re.MULTILINE)
