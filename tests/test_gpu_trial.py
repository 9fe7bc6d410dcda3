"""tools/gpu_trial.py: a part that fails costs no other part's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")

ROOT = Path(__file__).resolve().parent.parent


def test_a_part_that_fails_or_takes_too_long_leaves_the_results_of_others(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    out.write_text(json.dumps({"served": ["of an earlier run"], "errors": {"copy_rate": "of an earlier run"}}))

    def run(*options: str) -> dict[str, object]:
        command = [sys.executable, str(ROOT / "tools/gpu_trial.py"), "--device", "cpu", "--tiny", "--out", str(out)]
        # Without the interpreter the kernel cannot run here.
        subprocess.run([*command, *options], check=True, env={**os.environ, "TRITON_INTERPRET": "0"}, cwd=ROOT)
        found: dict[str, object] = json.loads(out.read_text())
        return found

    found = run("--parts", "lookups", "copy_rate")
    assert (
        found["served"] == ["of an earlier run"]
        and isinstance(found["copy_rate"], list)
        and len(found["copy_rate"]) == 1
    )
    errors = found["errors"]
    assert isinstance(errors, dict) and errors.keys() == {"lookups"} and "cannot run on cpu" in errors["lookups"]
    again = run("--parts", "embedding_bag", "--limit", "0.01")
    assert again["errors"] == {**errors, "embedding_bag": "stopped after 0.01 seconds"}
    assert again["copy_rate"] == found["copy_rate"]
