"""Training that goes on from an earlier checkpoint with new rows, and the delta that it makes possible."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.data import load_dataset
from recinfer.data.synthetic import generate_criteo
from recinfer.distributed.planner import plan_inference
from recinfer.errors import CheckpointError, ConfigError
from recinfer.inference.delta import make_delta
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.modules.embedding_configs import DataType
from recinfer.modules.mc_modules import LFU_EvictionPolicy, average_threshold_filter
from recinfer.training import train
from recinfer.training.job import TrainJob, run_job
from recinfer.training.loop import TrainSettings, fit
from recinfer.training.sources import MemorySource
from recinfer.vocabulary.comparison import compare_vocabularies, managed_dlrm


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


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tables take raw ids."""
    out = tmp_path_factory.mktemp("managed") / "managed.ckpt"
    dataset = load_dataset(None, "synthetic", limit=900, seed=2)
    list(compare_vocabularies(dataset, embedding_dim=4, batch_size=50, out=out, progress=False))
    return out


def test_raw_ids_of_new_rows_are_admitted_and_become_a_delta(managed: Path, tmp_path: Path):
    reader = CheckpointReader(managed)
    module = reader.build_model("meta")
    archive = tmp_path / "model.rqa"
    export_archive(
        module, reader, plan_inference(module, world_size=1, precision=DataType.FP32), archive, name="model", version="1",
        contract=reader.contract, progress=False,
    )  # fmt: skip
    job = TrainJob(
        tmp_path / "monday.ckpt", limit=900, seed=5, batch_size=50, start_from=managed, metrics=tmp_path / "curve.csv"
    )
    report = run_job(job)
    assert report is not None and report.ids_admitted >= report.ids_evicted > 0
    rows = list(csv.DictReader((tmp_path / "curve.csv").open()))
    assert (rows[-1]["ids_admitted"], rows[-1]["ids_evicted"]) == (str(report.ids_admitted), str(report.ids_evicted))
    assert CheckpointReader(job.out).model_json == reader.model_json
    make_delta(archive, module, CheckpointReader(job.out), tmp_path / "monday.rqd", progress=False)
    model = load(archive)
    assert reader.contract is not None
    ids = reader.contract.apply(load_dataset(None, "synthetic", limit=900, seed=5).columns)[1]
    before = model.lookup(ids)
    model.apply_delta(tmp_path / "monday.rqd")
    live = CheckpointReader(job.out).build_model("cpu")
    load_into(CheckpointReader(job.out), live)
    expected = live.sparse_arch.embedding_bag_collection(ids)[0]  # type: ignore[operator, union-attr]
    for name in ("C3", "C26"):
        assert torch.equal(model.lookup(ids)[name], expected[name]) and not torch.equal(before[name], expected[name])


def test_tables_without_raw_ids_admit_none(sunday: Path, tmp_path: Path):
    report = run_job(TrainJob(tmp_path / "monday.ckpt", limit=300, start_from=sunday, metrics=tmp_path / "curve.csv"))
    assert report is not None and (report.ids_admitted, report.ids_evicted) == (0, 0)
    assert list(csv.DictReader((tmp_path / "curve.csv").open()))[-1]["ids_admitted"] == ""


def test_raw_ids_are_admitted_in_one_process(managed: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="managed collisions trains in one process; leave out --world-size"):
        run_job(TrainJob(tmp_path / "out.ckpt", limit=300, start_from=managed), world_size=2)


def test_a_policy_that_the_checkpoint_does_not_describe_is_refused(tmp_path: Path):
    dataset = load_dataset(None, "synthetic", limit=300)
    source = MemorySource(dataset, 50)
    feature = dataset.contract.sparse[0].name
    model = managed_dlrm(dataset.contract, {feature: 20}, 3, embedding_dim=4)
    collisions = model.sparse_arch.embedding_bag_collection._managed_collision_collection
    made = collisions._managed_collision_modules[f"t_{feature}"]
    made._eviction_policy = LFU_EvictionPolicy(average_threshold_filter)
    fit(source, TrainSettings(4), model=model, out=tmp_path / "filtered.ckpt", progress=False)
    with pytest.raises(CheckpointError, match=f"table 't_{feature}' has an eviction policy that model.json does not"):
        train(dataset, start_from=tmp_path / "filtered.ckpt", progress=False)
