"""The data sets at TorchRec's places: what they give, from files and from a seed, and that ranks share it evenly."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recinfer.datasets import criteo, movielens, utils
from recinfer.datasets.random import RandomRecDataset
from recinfer.errors import ConfigError, InputError

ROWS = (23, 40, 8)


@pytest.fixture
def binary(tmp_path: Path) -> list[list[str]]:
    """Paths of three days: dense, sparse, labels; the first dense number of a row is its number."""
    random = np.random.RandomState(3)
    dense = random.rand(sum(ROWS), 13).astype(np.float32)
    dense[:, 0] = np.arange(sum(ROWS))
    arrays = dense, random.randint(0, 50, (sum(ROWS), 26)), random.randint(0, 2, (sum(ROWS), 1)).astype(np.int32)
    paths: list[list[str]] = []
    for name, whole in zip(("dense", "sparse", "labels"), arrays):
        paths.append([str(tmp_path / f"day_{day}_{name}.npy") for day in range(len(ROWS))])
        for path, part in zip(paths[-1], np.split(whole, np.cumsum(ROWS)[:-1])):
            np.save(path, part)
    return paths


def read(binary: list[list[str]], stage: str, batch_size: int, world_size: int, **options: Any) -> list[list[Any]]:
    """The batches of each rank."""
    sets = [
        criteo.InMemoryBinaryCriteoIterDataPipe(stage, *binary, batch_size, rank, world_size, **options)
        for rank in range(world_size)
    ]
    found = [list(data) for data in sets]
    assert [len(data) for data in sets] == [len(batches) for batches in found]
    return found


def row_numbers(ranks: list[list[Any]]) -> list[int]:
    return [int(n) for batches in ranks for batch in batches for n in batch.dense_features[:, 0]]


@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 1), (7, 2), (10, 3), (35, 2), (71, 1), (100, 3)])
def test_the_ranks_share_all_rows(binary: list[list[str]], batch_size: int, world_size: int, mmap_mode: bool) -> None:
    ranks = read(binary, "train", batch_size, world_size, mmap_mode=mmap_mode, hashes=[7] * 26)
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row_numbers(ranks)) == list(range(sum(ROWS)))
    sparse = np.concatenate([np.load(path) for path in binary[1]]) % 7
    labels = np.concatenate([np.load(path) for path in binary[2]])
    for batch in (batch for batches in ranks for batch in batches):
        rows = batch.dense_features[:, 0].long().numpy()
        assert batch.sparse_features.keys() == criteo.DEFAULT_CAT_NAMES
        for at, name in enumerate(criteo.DEFAULT_CAT_NAMES):
            assert batch.sparse_features[name].values().tolist() == sparse[rows, at].tolist()
        assert batch.sparse_features.lengths().tolist() == [1] * (26 * len(rows))
        assert batch.labels.tolist() == labels[rows, 0].tolist()


def test_rows_left_over_can_be_dropped(binary: list[list[str]]) -> None:
    ranks = read(binary, "train", 10, 3, drop_last=True)
    assert [[len(b.labels) for b in batches] for batches in ranks] == [[10, 10]] * 3


def test_validation_and_test_are_the_halves_of_the_first_file(binary: list[list[str]]) -> None:
    first = [paths[:1] for paths in binary]
    assert row_numbers(read(first, "val", 5, 1)) == list(range(12))
    assert row_numbers(read(first, "test", 5, 1)) == list(range(12, 23))


def test_a_shuffled_set_is_the_same_for_a_seed(binary: list[list[str]]) -> None:
    one, again, other = (
        row_numbers(read(binary, "train", 10, 2, shuffle_training_set=True, shuffle_training_set_random_seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert sorted(one) == sorted(other) == list(range(sum(ROWS)))
    state = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    read(binary, "train", 10, 2, shuffle_batches=True)
    assert np.random.get_state()[1].tolist() == state, "numpy's global generator was touched"  # type: ignore[index, union-attr]


def test_files_that_do_not_fit_are_refused(binary: list[list[str]]) -> None:
    dense, sparse, labels = binary
    with pytest.raises(InputError, match=r"\[\[23, 40, 8\], \[23, 40\], \[23, 40, 8\]\]"):
        read([dense, sparse[:2], labels], "train", 10, 1)
    with pytest.raises(ConfigError, match="expected one of train, val, test"):
        read(binary, "valid", 10, 1)
    with pytest.raises(ConfigError, match="path_manager_key"):
        read(binary, "train", 10, 1, path_manager_key="s3")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "day_0.tsv"
    rows = [["1", "-2", *["5"] * 12, *["0000000f"] * 26], ["0", "", *["98"] * 12, *[""] * 26]]
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_criteo_text(text: str) -> None:
    one, two = criteo.criteo_terabyte([text])
    assert list(one) == criteo.DEFAULT_COLUMN_NAMES
    assert (one["label"], one["int_0"], one["int_12"], one["cat_0"]) == (1, -2, 5, "0000000f")
    assert (two["label"], two["int_0"], two["cat_25"]) == (0, 0, "")
    unlabeled = Path(text).with_name("test.txt")
    unlabeled.write_text("\n".join(line.partition("\t")[2] for line in Path(text).read_text().splitlines()))
    (first, _) = criteo.criteo_kaggle(str(unlabeled))
    assert "label" not in first and first["int_0"] == -2
    assert list(criteo.criteo_kaggle(text, row_mapper=None).batch(2).map(len)) == [2]
    assert len(list(DataLoader(criteo.criteo_terabyte([text, text, text]), batch_size=None, num_workers=2))) == 6


def test_text_becomes_binary_files_of_small_ids(text: str, tmp_path: Path) -> None:
    dense, sparse, labels = (str(tmp_path / f"day_0_{part}.npy") for part in ("dense", "sparse", "labels"))
    criteo.BinaryCriteoUtils.tsv_to_npys(text, dense, sparse, labels)
    assert np.load(dense)[:, 0] == pytest.approx(np.log([2, 4]))
    assert np.load(dense).dtype == np.float32
    assert np.load(sparse)[:, 0].tolist() == [15, 0]
    assert np.load(labels).tolist() == [[1], [0]]
    assert criteo.BinaryCriteoUtils.get_shape_from_npy(sparse) == (2, 26)
    assert criteo.BinaryCriteoUtils.load_npy_range(sparse, 1, 1).tolist() == [[0] * 26]
    with pytest.raises(InputError, match="has 2 rows; got the range of 2 rows from row 1"):
        criteo.BinaryCriteoUtils.load_npy_range(sparse, 1, 2)

    ids = np.array([[9, 4], [7, 4], [9, 5], [7, 6], [9, 4]])
    np.save(tmp_path / "a.npy", ids[:2])
    np.save(tmp_path / "b.npy", ids[2:])
    files = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy")]
    criteo.BinaryCriteoUtils.sparse_to_contiguous(files, str(tmp_path), frequency_threshold=2, columns=2)
    found = np.concatenate([np.load(tmp_path / f"{name}_contig_freq.npy") for name in "ab"])
    assert found.tolist() == [[2, 2], [3, 2], [2, 1], [3, 1], [2, 2]]


def test_movielens_rows_with_their_movies(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,99\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n2,"Heat, 1995",Crime|Drama\n')
    rating = {"userId": 1, "movieId": 2, "rating": 3.5, "timestamp": 99}
    assert list(movielens.movielens_20m(str(tmp_path))) == [rating]
    (joined,) = movielens.movielens_25m(str(tmp_path), include_movies_data=True)
    assert joined == rating | {"title": "Heat, 1995", "genres": "Crime|Drama"}
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n")
    with pytest.raises(InputError, match="has no movie 2"):
        list(movielens.movielens_25m(str(tmp_path), include_movies_data=True))


def test_random_batches() -> None:
    def make(**options: Any) -> RandomRecDataset:
        return RandomRecDataset(["a", "b"], 50, manual_seed=1, num_dense=3, num_batches=4, **options)

    data = make(hash_sizes=[3, 9], ids_per_features=[1, 4], min_ids_per_feature=1, num_generated_batches=2)
    batches = list(data)
    assert len(data) == len(batches) == 4 and batches[2] is batches[0]
    features = batches[0].sparse_features
    assert features["a"].lengths().unique().tolist() == [1] and features["a"].values().unique().tolist() == [0, 1, 2]
    assert features["b"].lengths().unique().tolist() == [1, 2, 3, 4] and int(features["b"].values().max()) == 8
    assert batches[0].dense_features.shape == (50, 3) and batches[0].labels.unique().tolist() == [0, 1]
    assert make()._make_batch().labels.equal(make()._make_batch().labels)
    anew = list(make(num_generated_batches=-1))
    assert not anew[0].dense_features.equal(anew[1].dense_features)
    with pytest.raises(ConfigError, match="hash_sizes has 1 numbers for 2 keys"):
        make(hash_sizes=[3])
    moved = batches[0].to(torch.device("cpu"))
    assert moved.sparse_features.values().equal(features.values())


def test_the_start_of_a_stream() -> None:
    assert list(utils.Limit(range(300), 3)) == [0, 1, 2]


@pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is not installed")
def test_the_same_batches_as_torchrec(binary: list[list[str]]) -> None:
    theirs = importlib.import_module("torchrec.datasets.criteo")
    for options in ({}, {"drop_last": True}, {"shuffle_training_set": True}, {"shuffle_batches": True}):
        for stage, batch_size, rank, world_size in (("train", 7, 1, 3), ("val", 4, 0, 2), ("test", 100, 0, 1)):
            arguments = (stage, *binary, batch_size, rank, world_size)
            pairs = zip(
                criteo.InMemoryBinaryCriteoIterDataPipe(*arguments, **options),
                theirs.InMemoryBinaryCriteoIterDataPipe(*arguments, **options),
                strict=True,
            )
            for own, other in pairs:
                assert own.dense_features.equal(other.dense_features) and own.labels.equal(other.labels)
                assert own.sparse_features.values().equal(other.sparse_features.values())
    options = {"hash_size": 20, "ids_per_feature": 3, "manual_seed": 1, "num_batches": 3}
    other_set = importlib.import_module("torchrec.datasets.random").RandomRecDataset
    for own, other in zip(RandomRecDataset(["a"], 5, **options), other_set(["a"], 5, **options), strict=True):
        assert own.sparse_features.values().equal(other.sparse_features.values())
        assert own.dense_features.equal(other.dense_features) and own.labels.equal(other.labels)
