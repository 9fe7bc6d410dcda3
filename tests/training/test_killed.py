"""A rank killed in mid-training: an end within seconds that names it, and the same curve after --resume."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recinfer.errors import UnavailableError
from recinfer.training import launch
from recinfer.training.batches import Batch
from recinfer.training.job import TrainJob, TrainReport, run_job
from recinfer.training.launch import run_ranks
from recinfer.training.step_checkpoints import resume_folder
from recinfer.training.trainers import ShardedTrainer
from tests.warm import warm_context

LAST = 24  # steps that are whole when rank 1 is killed


def points(path: Path) -> dict[int, float]:
    with path.open(newline="") as file:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]}


def run_until_rank_1_is_killed(job: TrainJob) -> TrainReport | None:
    """What ``run_job`` runs on a rank; a SIGKILL takes rank 1 in its 25th step, for certain after a checkpoint."""
    done, step = 0, ShardedTrainer.step

    def step_or_die(self: ShardedTrainer, batches: Iterator[Batch]) -> tuple[float, int]:
        nonlocal done
        if done == LAST and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        found = step(self, batches)
        done += 1
        return found

    ShardedTrainer.step = step_or_die  # type: ignore[method-assign]
    return run_job(job)


def test_a_rank_killed_in_training_is_named_and_the_run_resumes_to_the_same_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_context()
    monkeypatch.setattr(launch, "_START", "forkserver")
    job = TrainJob(
        out=tmp_path / "broken", limit=1200, embedding_dim=4, batch_size=64, epochs=4, save_every=10,
        sharding={"*": "row_wise", "t_C1": "table_wise"}, metrics=tmp_path / "broken.csv",
    )  # fmt: skip
    with pytest.raises(UnavailableError, match=r"rank 1 was killed by SIGKILL.*--resume continues"):
        # By itself the other rank would wait for 600 s, and pytest ends a test after 300.
        run_ranks(2, run_until_rank_1_is_killed, job)
    assert not job.out.exists()  # no checkpoint but those on the way
    before = points(tmp_path / "broken.csv")

    resumed = run_job(replace(job, resume=True), world_size=2)
    whole = run_job(replace(job, out=tmp_path / "whole", metrics=tmp_path / "whole.csv"), world_size=2)
    assert resumed is not None and whole is not None
    expected = points(tmp_path / "whole.csv")
    assert LAST - 1 <= max(before) <= LAST < max(expected)  # it was killed on the way
    assert points(tmp_path / "broken.csv") == pytest.approx(expected, abs=1e-6)
    assert (resumed.num_steps, resumed.auc) == (whole.num_steps, pytest.approx(whole.auc, abs=1e-6))
    assert not resume_folder(job.out).exists()
