"""The readers of Criteo and MovieLens rows: every form of the files, joins against plain Python, the real samples."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from recinfer.data.contract import Hash, Vocabulary
from recinfer.data.criteo import DENSE, LABEL, SPARSE, criteo_contract, read_criteo
from recinfer.data.movielens import movielens_contract, read_atomic, read_movielens
from recinfer.data.synthetic import generate_criteo
from recinfer.data.tables import write_csv
from recinfer.errors import InputError

NAMES = [LABEL, *DENSE, *SPARSE]


@pytest.fixture
def criteo_rows() -> list[list[str]]:
    columns = generate_criteo(50, seed=1).columns
    text = {n: ["" if v != v else str(v).removesuffix(".0") for v in columns[n].tolist()] for n in NAMES}
    return [list(row) for row in zip(*text.values())]


def test_all_forms_of_the_criteo_file_are_the_same_rows(tmp_path: Path, criteo_rows: list[list[str]]) -> None:
    def write(name: str, rows: list[list[str]], delimiter: str) -> Path:
        with open(tmp_path / name, "w", newline="") as file:
            csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(rows)
        return tmp_path / name

    forms = [
        write("header.csv", [NAMES, *criteo_rows], ","),
        write("header.tsv", [NAMES, *criteo_rows], "\t"),
        write("train.txt", criteo_rows, "\t"),
        write("plain.csv", criteo_rows, ","),
    ]
    expected = {name: [row[at] for row in criteo_rows] for at, name in enumerate(NAMES)}
    for form in forms:
        assert {n: list(v) for n, v in read_criteo(form).items()} == expected, form
        assert len(read_criteo(form, limit=7)["C1"]) == 7
    unlabelled = write("test.txt", [row[1:] for row in criteo_rows], "\t")
    assert list(read_criteo(unlabelled)) == NAMES[1:]
    contract = criteo_contract(read_criteo(forms[0]))
    assert torch.equal(contract.apply(read_criteo(unlabelled))[0], contract.apply(read_criteo(forms[0]))[0])


def test_rows_in_memory_and_rows_in_a_file_give_the_same_inputs(tmp_path: Path) -> None:
    columns = generate_criteo(300, seed=2).columns
    contract = criteo_contract(columns)
    write_csv(tmp_path / "rows.csv", columns)
    again = read_criteo(tmp_path / "rows.csv")
    assert torch.equal(contract.labels(again), contract.labels(columns))
    for a, b in zip(contract.apply(columns), contract.apply(again)):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else torch.equal(a.values(), b.values())


@pytest.mark.parametrize(
    ("text", "message"), [("1\t2\t3\n", "has 3 fields and no column name"), ("", "has 1 fields and no column name")]
)
def test_a_file_of_something_else(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.tsv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_criteo(tmp_path / "x.tsv")


def test_the_criteo_contract_fits_its_rows() -> None:
    columns = generate_criteo(2000, seed=3).columns
    contract = criteo_contract(columns)
    assert contract.feature_names == SPARSE
    assert contract.num_dense == 13
    dense, kjt = contract.apply(columns)
    assert float(dense.mean(dim=0).abs().max()) < 1e-3
    assert float((dense.std(dim=0) - 1).abs().max()) < 1e-2
    for feature in contract.sparse:
        assert isinstance(feature.transform, Hash)
        texts = [t for t in columns[feature.name].tolist() if t]
        assert 2 * len(set(texts)) <= feature.num_embeddings or feature.num_embeddings == 16
        assert kjt[feature.name].values().numel() == len(texts)
    small = criteo_contract(columns, max_buckets=32)
    assert max(f.num_embeddings for f in small.sparse) == 32


def test_the_criteo_sample(sample_data: Path) -> None:
    columns = read_criteo(sample_data / "criteo_sample.csv")
    contract = criteo_contract(columns)
    dense, kjt = contract.apply(columns)
    assert dense.shape == (200, 13)
    assert bool(dense.isfinite().all())
    assert kjt.stride() == 200
    with open(sample_data / "criteo_sample.csv") as file:
        rows = list(csv.DictReader(file))
    assert kjt["C19"].lengths().tolist() == [int(bool(r["C19"])) for r in rows]
    assert contract.labels(columns).tolist() == [float(r["label"]) for r in rows]


# ---- MovieLens


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    (tmp_path / "ml.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "u1\ti1\t5\t100\nu2\ti2\t3\t200\nu1\ti9\t4\t300\nu9\ti1\t1\t400\n"
    )
    (tmp_path / "ml.user").write_text("user_id:token\tage:token\tgender:token\nu1\t24\tM\nu2\t53\tF\n")
    (tmp_path / "ml.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "i2\tGolden Eye\t1995\tAction Thriller\ni1\tToy Story\t1995\tComedy\n"
    )
    return tmp_path / "ml.inter"


def test_users_and_items_are_joined(ratings: Path) -> None:
    columns = {name: list(values) for name, values in read_movielens(ratings).items()}
    assert columns["rating"] == ["5", "3", "4", "1"]
    assert columns["age"] == ["24", "53", "24", ""]
    assert columns["gender"] == ["M", "F", "M", ""]
    assert columns["class"] == ["Comedy", "Action Thriller", "", "Comedy"]
    assert columns["movie_title"] == ["Toy Story", "Golden Eye", "", "Toy Story"]


def test_the_movielens_contract_reads_them(ratings: Path) -> None:
    columns = read_movielens(ratings)
    contract = movielens_contract(columns)
    dense, kjt = contract.apply(columns)
    assert dense.shape == (4, 2)
    assert kjt["genres"].lengths().tolist() == [1, 2, 0, 1]
    assert kjt["title"].lengths().tolist() == [2, 2, 0, 2]
    assert contract.labels(columns).tolist() == [1.0, 0.0, 1.0, 0.0]
    users = contract.sparse[0].transform
    assert isinstance(users, Vocabulary)
    assert users.tokens == ("u1", "u2", "u9")
    unseen = {name: values[:1].copy() for name, values in columns.items()}
    unseen["user_id"][0] = "somebody new"
    assert contract.apply(unseen)[1]["user_id"].values().tolist() == [3]


def test_interactions_alone_are_enough(ratings: Path) -> None:
    ratings.with_suffix(".user").unlink()
    ratings.with_suffix(".item").unlink()
    contract = movielens_contract(read_movielens(ratings))
    assert contract.feature_names == ("user_id", "item_id")
    assert [f.name for f in contract.dense] == ["timestamp"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ml.inter", "user_id\titem_id\n1\t2\n", "the header has 'user_id'; expected name:type"),
        ("ml.inter", "user_id:token\trating:float\n1\t2\n", "has no column item_id; it has user_id, rating"),
        ("ml.user", "name:token\tage:token\nu1\t2\n", "has no column user_id"),
        ("ml.user", "user_id:token\tage:token\nu1\t2\nu1\t3\n", "2 rows for 1 different user_id"),
        ("ml.user", "user_id:token\trating:float\nu1\t2\n", "columns rating are in another file too"),
    ],
)
def test_files_of_another_form_are_named(ratings: Path, file: str, text: str, message: str) -> None:
    (ratings.parent / file).write_text(text)
    with pytest.raises(InputError, match=rf"{file}: .*{message}"):
        read_movielens(ratings)


def test_the_movielens_sample(sample_data: Path) -> None:
    columns = read_movielens(sample_data / "ml-100k.inter", limit=2000)
    users = read_atomic(sample_data / "ml-100k.user")
    of_user = dict(zip(users["user_id"], users["occupation"]))
    assert [of_user[u] for u in columns["user_id"]] == list(columns["occupation"])
    contract = movielens_contract(columns)
    dense, kjt = contract.apply(columns)
    assert bool(dense.isfinite().all())
    assert kjt["genres"].values().numel() == sum(len(c.split()) for c in columns["class"])
    ratings = torch.tensor([float(r) for r in columns["rating"]])
    assert torch.equal(contract.labels(columns), (ratings >= 4).float())
