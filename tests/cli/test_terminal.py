"""What commands show on a terminal, and not in a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from pathlib import Path

from recinfer.checkpoint import save_checkpoint
from tests.serving.conftest import build_model
from tests.warm_shell import warm_tools


def test_a_terminal_of_80_columns_shows_what_takes_long_and_whole_numbers(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "tiny.ckpt", build_model())
    command = [str(warm_tools() / "recinfer"), "export", "--checkpoint", str(checkpoint)]
    command += ["--out", str(tmp_path / "tiny.rqa")]
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = ""
        with contextlib.suppress(OSError):  # the end, on Linux
            while part := os.read(ours, 65536).decode(errors="replace"):
                shown += part
    os.close(ours)
    assert process.returncode == 0, shown
    assert "exporting the dense part" in shown
    table = shown.rpartition("relative")[2].partition("compared")[0]
    assert "t_user" in table and "int8" in table and "…" not in table
