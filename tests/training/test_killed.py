"""A rank killed in mid-training: an end within seconds that names it, and the same curve after --resume."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import UnavailableError
from recinfer.training.job import TrainJob, run_job
from recinfer.training.loop import resume_folder


def points(path: Path) -> dict[int, float]:
    with path.open(newline="") as file:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]}


def kill_rank_1_after_a_checkpoint(folder: Path, others: set[int | None], killed: list[float], stop: Any) -> None:
    """``others``: children of this process that are not the training's; the suite's pool has ranks of the same name."""
    while not stop.wait(0.005):
        if list(folder.glob("step-*/train.json")):
            pids = [p.pid for p in multiprocessing.active_children() if p.name == "rank 1" and p.pid not in others]
            killed.append(time.monotonic())
            os.kill(pids[0], signal.SIGKILL)  # type: ignore[arg-type]
            return


def test_a_rank_killed_in_training_is_named_and_the_run_resumes_to_the_same_curve(tmp_path: Path) -> None:
    job = TrainJob(
        out=tmp_path / "broken", limit=1200, embedding_dim=4, batch_size=64, epochs=12, save_every=10,
        sharding={"*": "row_wise", "t_C1": "table_wise"}, metrics=tmp_path / "broken.csv",
    )  # fmt: skip
    killed: list[float] = []
    stop = threading.Event()
    others = {p.pid for p in multiprocessing.active_children()}
    killer = threading.Thread(
        target=kill_rank_1_after_a_checkpoint, args=(resume_folder(job.out), others, killed, stop)
    )
    killer.start()
    try:
        with pytest.raises(UnavailableError, match=r"rank 1 was killed by SIGKILL.*--resume goes on"):
            run_job(job, world_size=2)
        assert time.monotonic() - killed[0] < 20
    finally:
        stop.set()
        killer.join()
    assert not job.out.exists()  # no checkpoint but those on the way
    before = points(tmp_path / "broken.csv")

    resumed = run_job(replace(job, resume=True), world_size=2)
    whole = run_job(replace(job, out=tmp_path / "whole", metrics=tmp_path / "whole.csv"), world_size=2)
    assert resumed is not None and whole is not None
    expected = points(tmp_path / "whole.csv")
    assert 10 <= max(before) < max(expected)  # it was killed on the way
    assert points(tmp_path / "broken.csv") == pytest.approx(expected, abs=1e-6)
    assert (resumed.num_steps, resumed.auc) == (whole.num_steps, pytest.approx(whole.auc, abs=1e-6))
    assert not resume_folder(job.out).exists()
