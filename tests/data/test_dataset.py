"""Datasets: every format loads, splits without overlap, learns its contract from the training rows, refuses bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.data import load_dataset, read_columns, write_csv
from recinfer.data.contract import Vocabulary
from recinfer.data.dataset import DEFAULT_SYNTHETIC_ROWS
from recinfer.data.split import split_rows
from recinfer.errors import ConfigError, InputError


@pytest.mark.parametrize(("num_rows", "num_test"), [(2, 1), (3, 1), (200, 20), (1005, 100)])
def test_a_split_holds_every_row_once(num_rows: int, num_test: int) -> None:
    train, test = split_rows(num_rows)
    assert len(test) == num_test
    assert sorted([*train, *test]) == list(range(num_rows))


def test_a_split_depends_on_the_seed_alone() -> None:
    np.testing.assert_array_equal(split_rows(100, seed=1)[1], split_rows(100, seed=1)[1])
    assert not np.array_equal(split_rows(100, seed=1)[1], split_rows(100, seed=2)[1])


def test_a_fraction_that_leaves_nothing_still_leaves_a_row() -> None:
    assert [len(part) for part in split_rows(5, test_fraction=0.999)] == [1, 4]


@pytest.mark.parametrize(("num_rows", "fraction", "message"), [(1, 0.1, "1 rows"), (9, 0.0, "0.0"), (9, 1.0, "1.0")])
def test_what_cannot_be_split_is_refused(num_rows: int, fraction: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_rows(num_rows, test_fraction=fraction)


def test_synthetic_rows_through_the_contract() -> None:
    dataset = load_dataset(None, "synthetic", limit=500, seed=3)
    assert (dataset.name, dataset.num_rows) == ("synthetic", 500)
    columns = dataset.take(dataset.test)
    dense, sparse = dataset.contract.apply(columns)
    assert tuple(dense.shape) == (50, 13)
    assert sparse.keys() == [f"C{i}" for i in range(1, 27)]
    assert sparse["C1"].lengths().tolist() == [1] * 50
    empty = columns["C3"] == ""
    assert sparse["C3"].lengths().tolist() == (~empty).astype(int).tolist()
    assert dataset.contract.labels(columns).tolist() == columns["label"].tolist()


def test_synthetic_rows_survive_a_file(tmp_path: Path) -> None:
    """Rows in memory, as for training, and rows that `recinfer predict` reads from a file give the same inputs."""
    dataset = load_dataset(None, "synthetic", limit=300)
    write_csv(tmp_path / "rows.csv", dataset.columns)
    read = read_columns(tmp_path / "rows.csv", "criteo")
    dense, sparse = dataset.contract.apply(dataset.columns)
    dense_read, sparse_read = dataset.contract.apply(read)
    assert torch.equal(dense, dense_read)
    assert torch.equal(sparse.values(), sparse_read.values())
    assert torch.equal(sparse.lengths(), sparse_read.lengths())
    assert torch.equal(dataset.contract.labels(dataset.columns), dataset.contract.labels(read))


def test_the_contract_knows_the_training_rows_only(tmp_path: Path) -> None:
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows += [f"u{i}\ti{i}\t{i % 5 + 1}\t{1000 + i}" for i in range(50)]
    (tmp_path / "tiny.inter").write_text("\n".join(rows) + "\n")
    dataset = load_dataset(tmp_path / "tiny.inter", "movielens", seed=4)
    assert dataset.name == "tiny"
    users = dataset.contract.sparse[0].transform
    assert isinstance(users, Vocabulary)
    assert set(users.tokens) == set(dataset.take(dataset.train)["user_id"].tolist())
    _, sparse = dataset.contract.apply(dataset.take(dataset.test))
    assert sparse["user_id"].values().tolist() == [len(users.tokens)] * 5


def test_the_criteo_sample(sample_data: Path) -> None:
    dataset = load_dataset(sample_data / "criteo_sample.csv", "criteo")
    assert (dataset.name, dataset.num_rows, len(dataset.test)) == ("criteo_sample", 200, 20)
    dense, sparse = dataset.contract.apply(dataset.columns)
    assert tuple(dense.shape) == (200, 13)
    assert np.isfinite(dense.numpy()).all()
    assert sparse.stride() == 200
    assert sparse.lengths().sum() == sum((dataset.columns[f"C{i}"] != "").sum() for i in range(1, 27))
    assert load_dataset(sample_data / "criteo_sample.csv", "criteo", limit=30).num_rows == 30


def test_movielens(sample_data: Path) -> None:
    dataset = load_dataset(sample_data / "ml-100k.inter", "movielens", limit=5000)
    assert dataset.num_rows == 5000
    labels = dataset.contract.labels(dataset.columns)
    assert labels.sum() == (dataset.columns["rating"].astype(float) >= 4).sum()
    _, sparse = dataset.contract.apply(dataset.take(dataset.test))
    assert sparse["genres"].lengths().float().mean() > 1


@pytest.mark.parametrize(
    ("path", "format", "message"),
    [
        (None, "criteo", "needs a path"),
        ("rows.csv", "synthetic", "expected none"),
        ("rows.csv", "parquet", "'parquet'.*criteo, movielens"),
        (None, "parquet", "parquet"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(path: str | None, format: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(path, format)


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("label,I1\n1,2\n")
    for path, format in ((tmp_path / "rows.csv", "criteo"), (None, "synthetic")):
        with pytest.raises(InputError, match="0"):
            load_dataset(path, format, limit=0)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OSError, match="nowhere"):
        load_dataset("nowhere.csv", "criteo")


def test_synthetic_rows_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recinfer.data.dataset.DEFAULT_SYNTHETIC_ROWS", 123)
    assert DEFAULT_SYNTHETIC_ROWS == 50_000
    assert load_dataset(None, "synthetic").num_rows == 123
