"""The commands of docs/tutorials/many-hosts.md run as they stand, on free ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from recinfer import env
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


def test_from_one_process_to_many_hosts(tmp_path: Path):
    page = (ROOT / "docs/tutorials/many-hosts.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
    commands = commands.replace("--limit 20000", "--limit 2000")
    ports = {port: str(free_port()) for port in ("8500", "8580", "50051", "50081")}
    commands = re.sub(
        "|".join(ports), lambda found: ports[found[0]], commands
    )  # at once: a new one may hold an old one
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, more in (("recinfer", " -m recinfer"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{more} "$@"\n')
        (tools / name).chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    trap = "trap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT\n"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", trap + commands + "wait\n"],
        cwd=tmp_path,
        env=env.child_environment(PATH=path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("C1") >= 4 and "all shards are there" in done.stderr
