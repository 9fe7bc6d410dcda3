"""Resumed training continues from the last complete checkpoint, to the same weights and the same curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recinfer.data import Dataset, load_dataset
from recinfer.errors import CheckpointError, ConfigError
from recinfer.training.curve import Curve
from recinfer.training.loop import TrainResult, TrainSettings, fit
from recinfer.training.sources import MemorySource
from recinfer.training.step_checkpoints import resume_folder
from recinfer.training.trainers import LocalTrainer


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(None, "synthetic", limit=900, seed=2)


def run(
    dataset: Dataset, out: Path, curve: Curve, *, resume: bool = False, batch_size: int = 64, **changed: int
) -> TrainResult:
    settings = TrainSettings(**{"embedding_dim": 4, "epochs": 2, "seed": 3, "save_every": 5, **changed}, resume=resume)
    return fit(MemorySource(dataset, batch_size, seed=1), settings, out=out, curve=curve, progress=False)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the training break in ``step`` (from 1)."""
    made = 0
    original = LocalTrainer.step

    def counted(self, batches):
        nonlocal made
        made += 1
        if made == step:
            raise KeyboardInterrupt
        return original(self, batches)

    monkeypatch.setattr(LocalTrainer, "step", counted)


@pytest.mark.parametrize("step", [8, 17])  # in the first pass and in the second
def test_resuming_ends_where_an_unbroken_run_does(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    whole_curve = Curve()
    whole = run(dataset, tmp_path / "whole", whole_curve)
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            run(dataset, tmp_path / "broken", Curve())
    assert not (tmp_path / "broken").exists()
    curve = Curve(tmp_path / "curve.csv")
    resumed = run(dataset, tmp_path / "broken", curve, resume=True)
    for (name, one), two in zip(whole.model.state_dict().items(), resumed.model.state_dict().values()):
        assert torch.equal(one, two), name
    assert (resumed.auc, resumed.num_steps) == (whole.auc, whole.num_steps)
    shown = ("step", "epoch", "train_loss", "auc")
    points, expected = ([[row.get(c) for c in shown] for row in made.rows] for made in (curve, whole_curve))
    assert points == expected
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 1 + len(points)
    assert not resume_folder(tmp_path / "broken").exists()  # the run is done


def test_a_half_written_checkpoint_is_not_taken(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 18)
        with pytest.raises(KeyboardInterrupt):
            run(dataset, tmp_path / "out", Curve())
    folder = resume_folder(tmp_path / "out")
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["step-000000010", "step-000000015"]  # the last two
    (folder / names[-1] / "train.json").unlink()  # as if the process had died before the end of the save
    curve = Curve()
    run(dataset, tmp_path / "out", curve, resume=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        run(dataset, tmp_path / "other", Curve(), resume=True)


def test_resuming_with_other_batches_is_refused(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 12)
        with pytest.raises(KeyboardInterrupt):
            run(dataset, tmp_path / "out", Curve())
    with pytest.raises(ConfigError, match="trained with 64 rows per step"):
        run(dataset, tmp_path / "out", Curve(), resume=True, batch_size=32)
    saved = json.loads((resume_folder(tmp_path / "out") / "step-000000010" / "train.json").read_text())
    assert saved["step"] == 10


def test_resuming_with_fewer_epochs_or_another_dimension_is_refused(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 17)  # in the second epoch
        with pytest.raises(KeyboardInterrupt):
            run(dataset, tmp_path / "out", Curve())
    with pytest.raises(ConfigError, match="is of epoch 2, but this run has 1; train for more epochs"):
        run(dataset, tmp_path / "out", Curve(), resume=True, epochs=1)
    with pytest.raises(CheckpointError) as caught:
        run(dataset, tmp_path / "out", Curve(), resume=True, embedding_dim=8)
    assert "t_C3.weight has shape (1024, 4), the model's is (1024, 8) and 26 more" in str(caught.value)
    assert "0 keys" not in str(caught.value) and str(caught.value).count("has shape") == 3
