"""Training on several processes of this host: one process's result, and an end within seconds when a rank dies."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from recinfer import env
from recinfer.checkpoint import CheckpointReader
from recinfer.data.dataset import load_dataset
from recinfer.errors import ConfigError, UnavailableError
from recinfer.training import launch
from recinfer.training.job import TrainJob, run_job
from recinfer.training.launch import process_group, run_ranks
from tests.warm import Program, warm_context


def job(folder: Path, **changes: object) -> TrainJob:
    settings = {"out": folder / "ckpt", "limit": 1200, "embedding_dim": 4, "batch_size": 64, **changes}
    return TrainJob(**settings)  # type: ignore[arg-type]


def test_two_ranks_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_context()
    monkeypatch.setattr(launch, "_START", "forkserver")
    # Table-wise and row-wise: row-wise Adagrad is then the same whatever the number of ranks.
    sharding = {"*": "row_wise", "t_C1": "table_wise", "t_C2": "data_parallel"}
    one = run_job(job(tmp_path, out=tmp_path / "one", batch_size=128))
    two = run_job(job(tmp_path, sharding=sharding, metrics=tmp_path / "m.csv"), world_size=2)
    assert one is not None and two is not None
    assert (two.world_size, two.num_steps, two.num_test_rows) == (2, one.num_steps, one.num_test_rows)
    assert two.auc == pytest.approx(one.auc, abs=2e-3)
    assert two.log_loss == pytest.approx(one.log_loss, abs=1e-4)
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 1 + one.num_steps + 1
    first, second = CheckpointReader(tmp_path / "one"), CheckpointReader(tmp_path / "ckpt")
    assert first.keys() == second.keys()
    assert second.build_model() is not None  # model.json describes the whole model
    for key in first.keys():  # noqa: SIM118
        assert first.read(key).allclose(second.read(key), atol=1e-3), key


def fails(how: str) -> int:
    """Rank 1 fails; "raised": the starter gets its error long after rank 0 has lost its peer, failed too and ended."""
    import torch
    import torch.distributed as dist

    with socket.socket() as other, pytest.raises(OSError, match="in use"):  # nobody takes the port before a rank has it
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    leave = dist.destroy_process_group

    def leave_and_stall() -> None:
        leave()
        time.sleep(1.5)

    with process_group() as (rank, world_size):
        dist.all_reduce(torch.ones(1))
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            dist.destroy_process_group = leave_and_stall
            raise ValueError("no luck on this rank")
        dist.barrier()
        return world_size


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", r"rank 1 was killed by SIGKILL.*the other ranks were stopped"),
        ("raised", r"rank 1 failed with ValueError; the other ranks were stopped(.|\n)*no luck on this rank"),
    ],
    ids=["killed", "raised"],
)
def test_the_rank_that_failed_first_is_named_and_the_others_are_stopped(
    how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_context()
    monkeypatch.setattr(launch, "_START", "forkserver")
    with pytest.raises(UnavailableError, match=said):
        run_ranks(2, fails, how)


def lone_rank(how: str, rank: int, port: int) -> None:
    """Ranks that only their own host's starter watches: rank 2 fails, and the errors of the others name it."""
    import torch
    import torch.distributed as dist

    env.set_torchrun(rank, 3, port)
    try:
        with process_group():
            dist.all_reduce(torch.ones(1))
            if rank == 2 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2:
                raise ValueError("no luck on this rank")
            dist.all_reduce(torch.ones(1))
    except UnavailableError as error:
        print(error)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "killed",
            "rank 2 ended without an error message and may have been killed; this rank stops. --resume continues",
        ),
        ("raised", "rank 2 failed with ValueError: no luck on this rank; this rank stops"),
    ],
    ids=["killed", "raised"],
)
def test_ranks_that_start_alone_name_the_one_they_lost(how: str, said: str) -> None:
    store = launch._store()
    with ExitStack() as stack:
        ranks = []
        for rank in range(3):
            command = f"from tests.training.test_ranks import lone_rank; lone_rank({how!r}, {rank}, {store.port})"
            ranks.append(stack.enter_context(Program(command)))
        heard = [process.communicate()[0] for process in ranks]
    assert heard[0].startswith(said) and heard[1].startswith(said)
    assert heard[2] == ""


def test_options_that_need_ranks_are_refused_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--world-size 2 or more"):
        run_job(job(tmp_path, sharding={"*": "row_wise"}))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK=3"):
        run_job(job(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu trains there")
@pytest.mark.parametrize("world_size", [1, 2])
def test_missing_gpu_ends_the_run_before_its_ranks_start(tmp_path: Path, world_size: int) -> None:
    with pytest.raises(UnavailableError, match="--device cuda needs a"):
        run_job(job(tmp_path, device="cuda"), world_size)


def test_rows_stream_from_a_file(tmp_path: Path) -> None:
    from recinfer.data.criteo import DENSE, LABEL, SPARSE
    from recinfer.data.tables import write_csv

    dataset = load_dataset(None, "synthetic", limit=900, seed=1)
    write_csv(tmp_path / "rows.csv", {n: dataset.columns[n] for n in (LABEL, *DENSE, *SPARSE)})
    report = run_job(
        job(tmp_path, data=tmp_path / "rows.csv", format="criteo", stream=True, plot=tmp_path / "curve.png", limit=None)
    )
    assert report is not None
    assert report.num_train_rows + report.num_test_rows == 900
    assert (tmp_path / "curve.png").stat().st_size > 1000
