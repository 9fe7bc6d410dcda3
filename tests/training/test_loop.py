"""Training: it finds a planted signal, repeats itself, writes a checkpoint that gives the same answers, and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.data import Dataset, load_dataset
from recinfer.data.metrics import auc, log_loss, sigmoid
from recinfer.data.synthetic import generate_criteo
from recinfer.errors import CheckpointError, ConfigError, InputError
from recinfer.training import train
from recinfer.training.batches import Examples
from recinfer.training.model import build_dlrm, predict_logits, start_at_rate

ROWS = 16_000


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(None, "synthetic", limit=ROWS, seed=1)


@pytest.fixture(scope="module")
def small() -> Dataset:
    return load_dataset(None, "synthetic", limit=600, seed=2)


@pytest.fixture(scope="module")
def trained(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory):
    return train(dataset, embedding_dim=8, seed=3, out=tmp_path_factory.mktemp("out") / "ckpt", progress=False)


def test_it_finds_the_planted_signal(dataset: Dataset, trained) -> None:
    best = auc(dataset.columns["label"][dataset.test], generate_criteo(ROWS, seed=1).probability[dataset.test])
    assert 0.7 < trained.auc < best + 0.01
    labels = dataset.columns["label"][dataset.test]
    assert trained.log_loss < log_loss(labels, np.full(labels.size, labels.mean())) - 0.03


def test_the_result_says_what_was_done(dataset: Dataset, trained) -> None:
    assert trained.num_train_rows == len(dataset.train) == 0.9 * ROWS
    assert trained.num_test_rows == len(dataset.test)
    assert trained.num_steps == math.ceil(len(dataset.train) / 512)
    assert len(trained.train_losses) == 1
    assert not trained.model.training
    held_out = Examples.from_columns(dataset.contract, dataset.take(dataset.test))
    logits = predict_logits(trained.model, held_out)
    assert logits.shape == (len(dataset.test),)
    assert auc(held_out.labels, logits) == pytest.approx(trained.auc, abs=1e-6)
    assert log_loss(held_out.labels, sigmoid(logits)) == pytest.approx(trained.log_loss, abs=1e-9)


def test_the_checkpoint_gives_the_same_answers(dataset: Dataset, trained) -> None:
    reader = CheckpointReader(trained.checkpoint)
    model = reader.build_model(device="cpu")
    load_into(reader, model)
    held_out = Examples.from_columns(reader.contract, dataset.take(dataset.test))
    np.testing.assert_array_equal(predict_logits(model.eval(), held_out), predict_logits(trained.model, held_out))


def test_the_checkpoint_holds_optimizer_and_contract(dataset: Dataset, trained) -> None:
    reader = CheckpointReader(trained.checkpoint, prefix="")
    keys = reader.stored_keys()
    name = "sparse_arch.embedding_bag_collection.embedding_bags.t_C1.weight"
    assert reader.shape(f"optim.state.{name}.sum") == (dataset.contract.sparse[0].num_embeddings, 1)
    assert any(key.startswith("optim.state.over_arch") and key.endswith("exp_avg") for key in keys)
    about = json.loads((trained.checkpoint / "model.json").read_text())
    assert about["name"] == "synthetic"
    assert about["model"]["class"] == "dlrm"
    assert reader.contract == dataset.contract


def test_a_seed_gives_the_same_weights_again(small: Dataset) -> None:
    before = torch.get_rng_state()
    one, two, other = (train(small, embedding_dim=4, seed=seed, progress=False) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, two.model.state_dict()[name]), name
    assert one.auc == two.auc != other.auc


def test_more_epochs_lower_the_training_loss(small: Dataset) -> None:
    result = train(small, embedding_dim=4, epochs=4, batch_size=64, progress=False)
    assert len(result.train_losses) == 4
    assert result.train_losses[-1] < result.train_losses[0] - 0.05
    assert result.num_steps == 4 * math.ceil(540 / 64)


def test_embeddings_of_rows_that_never_came_stay(small: Dataset) -> None:
    start = build_dlrm(small.contract, embedding_dim=4, seed=0)
    end = train(small, embedding_dim=4, progress=False).model
    examples = Examples.from_columns(small.contract, small.take(small.train))
    seen = examples.batch(torch.arange(len(examples))).sparse_features["C1"].values().unique()
    weights = [m.sparse_arch.embedding_bag_collection.embedding_bags["t_C1"].weight for m in (start, end)]
    changed = (weights[0] != weights[1]).any(dim=1)
    assert changed[seen].float().mean() > 0.9
    changed[seen] = False
    assert not changed.any()


def test_the_progress_bar_goes_to_stderr(small: Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    train(small, embedding_dim=4, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    train(small, embedding_dim=4, progress=False)
    assert capfd.readouterr().err == ""


def test_one_held_out_class_gives_nan(small: Dataset) -> None:
    clicks = np.flatnonzero(small.columns["label"] == 1)
    one_class = Dataset(small.name, small.columns, small.contract, small.train, clicks[:5])
    result = train(one_class, embedding_dim=4, progress=False)
    assert math.isnan(result.auc)
    assert math.isfinite(result.log_loss)


def test_the_model_starts_at_the_base_rate(small: Dataset) -> None:
    model = build_dlrm(small.contract, embedding_dim=4)
    start_at_rate(model, 0.2)
    examples = Examples.from_columns(small.contract, small.take(small.test))
    assert sigmoid(predict_logits(model, examples)).mean() == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch_size": 0}, {"embedding_dim": 0}])
def test_settings_below_one_are_refused(small: Dataset, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=0"):
        train(small, progress=False, **wrong)


def test_a_folder_with_other_files_is_refused_before_training(small: Dataset, tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        train(small, epochs=10**9, out=tmp_path, progress=False)


def test_a_loss_that_explodes_is_an_error(small: Dataset) -> None:
    with pytest.raises(ConfigError, match="lower dense_lr"):
        train(small, embedding_dim=4, epochs=20, batch_size=16, dense_lr=1e30, progress=False)


def test_a_split_without_rows_is_refused(small: Dataset) -> None:
    empty = Dataset(small.name, small.columns, small.contract, small.train, small.test[:0])
    with pytest.raises(InputError, match="no held-out rows"):
        train(empty, progress=False)


def test_a_contract_without_dense_features_is_refused(small: Dataset) -> None:
    from recinfer.data.contract import FeatureContract

    with pytest.raises(ConfigError, match="26 sparse and 0 dense"):
        build_dlrm(FeatureContract(small.contract.sparse, (), small.contract.label))


def test_movielens(sample_data: Path) -> None:
    result = train(load_dataset(sample_data / "ml-100k.inter", "movielens"), progress=False)
    assert result.auc > 0.75


def test_two_hundred_real_rows_run_through(sample_data: Path) -> None:
    result = train(load_dataset(sample_data / "criteo_sample.csv", "criteo"), epochs=2, progress=False)
    assert math.isfinite(result.log_loss)
    assert result.num_test_rows == 20
