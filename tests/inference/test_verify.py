"""verify: a valid archive passes, and each problem is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load, save
from torch import nn
from typer.testing import CliRunner

from recinfer.archive.reader import Archive
from recinfer.cli.main import app
from recinfer.errors import ArchiveError
from recinfer.inference.verify import verify
from tests.hostile.damage import fail_in_onnx, relist


@pytest.fixture
def copied(small: tuple[nn.Module, Archive], tmp_path: Path) -> Path:
    root = tmp_path / "small.rqa"
    shutil.copytree(small[1].root, root)
    return root


def test_a_sound_archive(copied: Path) -> None:
    report = verify(copied)
    assert report.ok
    assert report.engines == ("torch", "onnx")
    assert report.num_requests == 5
    assert report.num_files == len([p for p in copied.rglob("*") if p.is_file()]) - 1
    console = Console(record=True, width=100)
    console.print(report)
    assert "5 replayed on torch, onnx" in console.export_text()


def test_every_kind_of_module(everything: tuple[nn.Module, Archive]) -> None:
    assert verify(everything[1].root).ok


def test_files_that_the_manifest_does_not_list(copied: Path) -> None:
    (copied / "notes").mkdir()
    (copied / "notes" / "a.txt").write_text("hello")
    report = verify(copied)
    assert not report.ok
    assert report.problems == ("[F6] 'notes/a.txt' is not listed in the manifest",)


def test_other_answers(copied: Path) -> None:
    path = copied / "check/answers.safetensors"
    tensors = load(path.read_bytes())
    tensors["2/output/0"] += 1e-3
    path.write_bytes(save(tensors))
    relist(copied)
    report = verify(copied)
    assert not report.ok
    assert len(report.problems) == 2  # on both engines
    assert all("[C2] request 2: output 0 differs" in problem for problem in report.problems)


def test_rounding_of_another_machine_is_fine(copied: Path) -> None:
    path = copied / "check/answers.safetensors"
    tensors = {name: t + t.abs() * 1e-7 * torch.randn_like(t) for name, t in load(path.read_bytes()).items()}
    path.write_bytes(save(tensors))
    relist(copied)
    assert verify(copied).ok


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_changed_byte_of_a_shard(copied: Path, rank: int) -> None:
    path = copied / f"shards/rank-{rank:05d}.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 2048] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ArchiveError) as caught:
        verify(copied)
    assert caught.value.rule == "F5"


def test_a_damaged_manifest(copied: Path) -> None:
    data = json.loads((copied / "manifest.json").read_text())
    del data["tables"]
    (copied / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ArchiveError) as caught:
        verify(copied)
    assert caught.value.rule == "J3"


def test_a_dense_program_that_fails_in_its_run(copied: Path) -> None:
    fail_in_onnx(copied)
    report = verify(copied)
    assert len(report.problems) == 5
    for index, problem in enumerate(report.problems):
        assert problem.startswith(f"[C2] golden request {index} fails: ")
        assert problem.endswith(" on onnx") and "out of data bounds" in problem and "\n" not in problem
    done = CliRunner().invoke(app, ["verify", str(copied)])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "golden request 0 fails" in " ".join(done.output.split())
