"""`recinfer train --device cuda`: the run of one process, and of one rank over NCCL, against the same run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recinfer import fbgemm
from recinfer.checkpoint import CheckpointReader
from recinfer.training import launch
from recinfer.training.job import TrainJob, TrainReport, _on_new_ranks, _on_rank, run_job
from tests.warm import warm_context

cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    ],
)


def trained(folder: Path, device: str, *, sharded: bool) -> TrainReport:
    job = TrainJob(out=folder, limit=1200, embedding_dim=4, batch_size=64, device=device, save_every=5)
    # run_job starts new ranks from two on: one rank alone has a process group here too.
    report = _on_new_ranks(job, 1, _on_rank) if sharded else run_job(job)
    assert report is not None
    return report


@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("sharded", [False, True], ids=["local", "one-rank"])
def test_a_device_trains_what_one_process_on_the_cpu_does(
    tmp_path: Path, device: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sharded and device == "cuda" and not fbgemm.HAS_CUDA:
        pytest.skip("FBGEMM's build here is not the one for CUDA")
    if device == "cpu":  # a rank of CUDA starts as everywhere
        warm_context()
        monkeypatch.setattr(launch, "_START", "forkserver")
    mine = trained(tmp_path / "mine", device, sharded=sharded)
    theirs = trained(tmp_path / "cpu", "cpu", sharded=False)
    assert mine.num_steps == theirs.num_steps
    assert mine.auc == pytest.approx(theirs.auc, abs=5e-3)
    assert mine.log_loss == pytest.approx(theirs.log_loss, abs=1e-3)
    first, second = CheckpointReader(tmp_path / "mine"), CheckpointReader(tmp_path / "cpu")
    assert first.keys() == second.keys()
    for key in first.keys():  # noqa: SIM118
        torch.testing.assert_close(first.read(key), second.read(key), rtol=1e-2, atol=1e-3)
