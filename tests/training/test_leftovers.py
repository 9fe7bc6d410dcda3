"""A training that ends on a full disk or by Ctrl-C while it writes a checkpoint leaves no part of one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from recinfer.errors import UnavailableError
from recinfer.training import launch
from recinfer.training.job import TrainJob, TrainReport, _on_new_ranks, _on_rank, run_job
from tests.warm import RECINFER, Program, run_program, warm_context

LIMITED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # writes fail as they do on a full disk
{RECINFER}
"""

STANDING_STILL = f"""
import time
import torch.distributed.checkpoint as dcp
write = dcp.FileSystemWriter.write_data

def written_and_still(*arguments):
    write(*arguments)
    print("written", flush=True)
    time.sleep(600)

dcp.FileSystemWriter.write_data = written_and_still
{RECINFER}
"""


@pytest.mark.parametrize("options", [[], ["--save-every", "1"]])
def test_files_that_cannot_grow(tmp_path: Path, options: list[str]) -> None:
    code, out, err = run_program(LIMITED, "train", "--limit", "200", *options, "--out", tmp_path / "ckpt")
    assert (code, out) == (2, "")
    where = tmp_path / ("ckpt.steps/step-000000001" if options else "ckpt")
    assert err.splitlines()[-1] == f"error: cannot write the checkpoint {str(where)!r}: File too large"
    assert not [path for path in tmp_path.rglob("*") if path.name != "ckpt.steps"]


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root and mount")
    try:
        with pytest.raises(UnavailableError, match="No space left on device"):
            run_job(TrainJob(out=tmp_path / "ckpt", limit=200))
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_control_c(tmp_path: Path) -> None:
    with Program(STANDING_STILL, "train", "--limit", "200", "--out", tmp_path / "ckpt") as process:
        assert process.stdout.readline() == "written\n", process.communicate()
        assert [path.name for path in tmp_path.iterdir()] == [".ckpt.partial"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert not list(tmp_path.iterdir())


def stand_still_in_writing(job: TrainJob) -> TrainReport | None:
    """What a rank runs."""

    def still(*arguments: object) -> None:
        (job.out.parent / f"writing-{os.environ['RANK']}").touch()
        time.sleep(600)

    dcp.FileSystemWriter.write_data = still  # type: ignore[method-assign,assignment]
    return _on_rank(job)


def test_control_c_with_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_context()
    monkeypatch.setattr(launch, "_START", "forkserver")

    def interrupt() -> None:
        while not all((tmp_path / f"writing-{rank}").exists() for rank in range(2)) and not over.wait(0.02):
            pass
        seen.extend(path.name for path in tmp_path.iterdir())
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    seen: list[str] = []
    over = threading.Event()
    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _on_new_ranks(TrainJob(out=tmp_path / "ckpt", limit=200, embedding_dim=4), 2, stand_still_in_writing)
    finally:
        over.set()
        watching.join()
    assert ".ckpt.partial" in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["writing-0", "writing-1"]
