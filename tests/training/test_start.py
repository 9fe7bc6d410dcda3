"""Training that goes on from an earlier checkpoint with new rows, and the delta that it makes possible."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recinfer.checkpoint import CheckpointReader
from recinfer.data import load_dataset
from recinfer.data.synthetic import generate_criteo
from recinfer.distributed.planner import plan_inference
from recinfer.errors import CheckpointError
from recinfer.inference.delta import make_delta
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.training import train
from recinfer.training.job import TrainJob, run_job


@pytest.fixture(scope="module")
def sunday(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sunday") / "sunday.ckpt"
    train(load_dataset(None, "synthetic", limit=900, seed=2), embedding_dim=4, out=out, progress=False)
    return out


def test_a_run_that_learns_nothing_keeps_the_weights_and_the_contract_that_it_started_from(
    sunday: Path, tmp_path: Path
):
    monday = load_dataset(None, "synthetic", limit=600, seed=5)
    started = train(
        monday, start_from=sunday, dense_lr=1e-12, sparse_lr=1e-12, out=tmp_path / "monday.ckpt", progress=False
    )
    before = CheckpointReader(sunday)
    for name, now in started.model.state_dict().items():
        torch.testing.assert_close(now, before.read(name), rtol=0, atol=1e-6)
    after = CheckpointReader(tmp_path / "monday.ckpt")
    assert after.model_json == before.model_json
    assert after.contract != monday.contract  # which its own rows would have given


@pytest.mark.parametrize("stream", [False, True])
def test_a_days_rows_become_a_delta(sunday: Path, tmp_path: Path, stream: bool):
    reader = CheckpointReader(sunday)
    module = reader.build_model("meta")
    archive = tmp_path / "model.rqa"
    export_archive(
        module, reader, plan_inference(module, world_size=1), archive, name="model", version="1",
        contract=reader.contract, progress=False,
    )  # fmt: skip
    columns = generate_criteo(400, seed=7).columns
    with open(tmp_path / "monday.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))
    job = TrainJob(
        tmp_path / "monday.ckpt", tmp_path / "monday.csv", "criteo", batch_size=64, stream=stream, start_from=sunday
    )
    assert run_job(job) is not None
    make_delta(archive, module, CheckpointReader(job.out), tmp_path / "monday.rqd", progress=False)
    model = load(archive)
    assert reader.contract is not None
    every_row = {"C2": list(range(reader.contract.sparse[1].num_embeddings))}
    before = model.lookup(every_row)["C2"].clone()
    model.apply_delta(tmp_path / "monday.rqd")
    assert not torch.equal(model.lookup(every_row)["C2"], before)


def test_only_a_checkpoint_of_the_loop_can_be_started_from(tmp_path: Path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "plain.pt")
    job = TrainJob(tmp_path / "out.ckpt", start_from=tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match=r"plain\.pt: has no DLRM with a feature contract"):
        run_job(job)
    with pytest.raises(CheckpointError, match="nothing"):
        run_job(replace(job, start_from=tmp_path / "nothing"))
