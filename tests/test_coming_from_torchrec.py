"""The pages for users of TorchRec are true: their blocks run, under recinfer and, where it is installed, under TorchRec."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pages import ROOT, blocks, run_page, script_of

PAGE = ROOT / "docs/explanation/coming-from-torchrec.md"
TUTORIAL = ROOT / "docs/tutorials/torchrec-model.md"


def said(package: str) -> list[str]:
    """The output of the traps' program under a package, as the page lists it: names and values, in order."""
    (row,) = re.findall(rf"^\| `{package}.txt` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return row.replace(",", "").split()


def test_program_of_the_traps_is_right_under_recinfer(tmp_path: Path) -> None:
    (program,) = (code for code in blocks(PAGE, "python") if code.startswith("# traps.py"))
    done = run_page(f"python - <<'END'\n{program.replace('torchrec', 'recinfer')}END\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == said("recinfer")


@pytest.fixture
def torchrec(request: pytest.FixtureRequest) -> str:
    """The folder that has torchrec, for the end of a path: both packages in one interpreter, as a TorchRec user has them."""
    given = request.config.getoption("--torchrec-python")
    if importlib.util.find_spec("torchrec") is None and not given:
        pytest.skip("torchrec is not installed; --torchrec-python PATH names an interpreter that has it")
    where = "import pathlib, torchrec; print(pathlib.Path(torchrec.__file__).parents[1])"
    return subprocess.run(
        [given or sys.executable, "-c", where], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_page_runs_beside_torchrec(tmp_path: Path, torchrec: str) -> None:
    script, skipped = script_of(PAGE)
    done = run_page(script, tmp_path, beside=torchrec)
    assert done.returncode == 0 and not skipped, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for package in ("torchrec", "recinfer"):
        assert (tmp_path / f"work/{package}.txt").read_text().split() == said(package)


def test_the_tutorial_runs_with_torchrec(tmp_path: Path, torchrec: str) -> None:
    script, skipped = script_of(TUTORIAL)
    done = run_page(script, tmp_path, beside=torchrec)
    assert done.returncode == 0 and len(skipped) == 1, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "output" in done.stdout


def test_packed_rows_and_vectors_equal_torchrecs_to_the_bit(tmp_path: Path, torchrec: str) -> None:
    program = (ROOT / "tests/quant/quantize_program.py").read_text()
    script = "".join(
        f"cat > {package}_program.py <<'END'\n{program.replace('torchrec', package)}END\n"
        f"python {package}_program.py {tmp_path / package}.pt\n"
        for package in ("torchrec", "recinfer")
    )
    done = run_page(script, tmp_path, beside=torchrec)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = torch.load(tmp_path / "torchrec.pt"), torch.load(tmp_path / "recinfer.pt")
    assert theirs.keys() == ours.keys() and len(ours) == 24
    for name, found in ours.items():
        assert torch.equal(theirs[name][:, : found.shape[1]], found), name  # TorchRec pads rows to 16 bytes
