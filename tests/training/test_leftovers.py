"""A training that ends on a full disk, by Ctrl-C or SIGTERM while it writes a checkpoint leaves no part of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from recinfer.cli.interrupts import cleaning_up_at_signals
from recinfer.errors import CheckpointError, UnavailableError
from recinfer.training import launch
from recinfer.training.job import TrainJob, TrainReport, _on_new_ranks, _on_rank, run_job
from tests.warm import LONGEST_S, RECINFER, Program, run_program, warm_context
from tests.warm_shell import warm_tools

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


def test_a_folder_that_may_not_be_written_ends_a_run_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the answer of the system is made."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and Path(path) == tmp_path))
    monkeypatch.setattr("recinfer.training.job.load_dataset", None)  # the run ends before it reads rows
    where = tmp_path / "new" / "ckpt"
    with pytest.raises(
        CheckpointError, match=f"cannot write the checkpoint '{where}': no files may be made in '{tmp_path}'"
    ):
        run_job(TrainJob(out=where, limit=200))


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_control_c_and_sigterm(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with Program(STANDING_STILL, "train", "--limit", "200", "--out", tmp_path / "ckpt") as process:
        assert process.stdout.readline() == "written\n", process.communicate()
        assert [path.name for path in tmp_path.iterdir()] == [".ckpt.partial"]
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == code, err
    assert (err.splitlines()[-1] == "interrupted") == (number == signal.SIGINT)
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def stand_still_in_writing(job: TrainJob) -> TrainReport | None:
    """What a rank runs."""

    def still(*arguments: object) -> None:
        (job.out.parent / f"writing-{os.environ['RANK']}").touch()
        time.sleep(600)

    dcp.FileSystemWriter.write_data = still  # type: ignore[method-assign,assignment]
    return _on_rank(job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_control_c_and_sigterm_with_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    warm_context()
    monkeypatch.setattr(launch, "_START", "forkserver")

    def interrupt() -> None:
        while not all((tmp_path / f"writing-{rank}").exists() for rank in range(2)) and not over.wait(0.02):
            pass
        seen.extend(path.name for path in tmp_path.iterdir())
        if not over.is_set():
            os.kill(os.getpid(), number)

    seen: list[str] = []
    ended: list[int] = []  # what would end the process, were it not pytest's
    former = signal.signal(signal.SIGTERM, lambda got, _: ended.append(got))
    over = threading.Event()
    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        with pytest.raises(KeyboardInterrupt), cleaning_up_at_signals():
            _on_new_ranks(TrainJob(out=tmp_path / "ckpt", limit=200, embedding_dim=4), 2, stand_still_in_writing)
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGTERM, former)
    assert ended == ([number] if number == signal.SIGTERM else [])
    assert ".ckpt.partial" in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["writing-0", "writing-1"]


TORCHRUN = f"""
import os, sys, time
import torch.distributed.checkpoint as dcp
write = dcp.FileSystemWriter.write_data

def written_and_still(*arguments):
    write(*arguments)
    open(os.path.join(os.path.dirname(sys.argv[-1]), "wrote-" + os.environ["RANK"]), "w").close()
    time.sleep(600)

dcp.FileSystemWriter.write_data = written_and_still
{RECINFER}
"""


def test_sigterm_to_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TORCHRUN)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    run.append(str(warm_tools() / "python"))  # which passes torchrun's signals on
    train = ["train", "--limit", "200", "--embedding-dim", "4", "--out", str(tmp_path / "ckpt")]
    with subprocess.Popen([*run, str(tmp_path / "program.py"), *train], stderr=subprocess.PIPE, text=True) as process:
        try:
            while not all((tmp_path / f"wrote-{rank}").exists() for rank in range(2)):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            assert (tmp_path / ".ckpt.partial").exists()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=LONGEST_S)
        finally:
            process.kill()
    assert process.returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "wrote-0", "wrote-1"], err
