"""Rows of files, block by block: the same rows as reading the file whole, whatever the format, packing or cut."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from recinfer.data.criteo import DENSE, LABEL, SPARSE, criteo_contract, read_criteo
from recinfer.data.movielens import read_movielens
from recinfer.data.stream import RowStream, held_out_mask
from recinfer.data.synthetic import generate_criteo
from recinfer.data.tables import write_csv
from recinfer.errors import ConfigError, InputError

ROWS = 103


@pytest.fixture(scope="module")
def columns() -> dict[str, np.ndarray]:
    made = generate_criteo(ROWS, 3).columns

    def text(value: object) -> str:  # as the original files write it
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else str(int(value))
        return str(value)

    return {name: np.array([text(v) for v in made[name]], dtype=object) for name in (LABEL, *DENSE, *SPARSE)}


@pytest.fixture
def files(tmp_path: Path, columns: dict[str, np.ndarray]) -> dict[str, Path]:
    """The same rows in every form."""
    found = {"csv": tmp_path / "rows.csv"}
    write_csv(found["csv"], columns)
    lines = ["\t".join(row) for row in zip(*columns.values())]
    found["tsv"] = tmp_path / "rows.tsv"
    found["tsv"].write_text("\n".join(lines) + "\n")
    found["gz"] = tmp_path / "rows.tsv.gz"
    found["gz"].write_bytes(gzip.compress(found["tsv"].read_bytes()))
    found["folder"] = tmp_path / "parts"
    found["folder"].mkdir()
    for part, start in enumerate(range(0, ROWS, 40)):
        (found["folder"] / f"day_{part}.tsv").write_text("\n".join(lines[start : start + 40]))
    (found["folder"] / "_SUCCESS").write_text("")
    return found


def whole(blocks: list[dict[str, np.ndarray]]) -> dict[str, list[str]]:
    return {name: [str(v) for block in blocks for v in block[name]] for name in blocks[0]}


@pytest.mark.parametrize("form", ["csv", "tsv", "gz", "folder"])
@pytest.mark.parametrize("rows", [1, 7, 40, 1000])
def test_blocks_are_the_rows_of_the_file(
    files: dict[str, Path], columns: dict[str, np.ndarray], form: str, rows: int
) -> None:
    blocks = list(RowStream(files[form]).blocks(rows))
    assert [len(b[LABEL]) for b in blocks] == [rows] * (ROWS // rows) + [ROWS % rows] * bool(ROWS % rows)
    assert whole(blocks) == {name: list(values) for name, values in columns.items()}


def test_parquet_gives_the_same_ids_as_text(tmp_path: Path, files: dict[str, Path]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = read_criteo(files["csv"])
    typed = {
        name: [None if v in ("", "nan") else int(float(v)) for v in values] if name in (LABEL, *DENSE) else list(values)
        for name, values in text.items()
    }
    parquet.write_table(pyarrow.table(typed), tmp_path / "rows.parquet", row_group_size=30)
    contract = criteo_contract(text)
    dense, sparse = contract.apply(text)
    at = 0
    for block in RowStream(tmp_path / "rows.parquet").blocks(25):
        size = len(block[LABEL])
        block_dense, block_sparse = contract.apply(block)
        assert block_dense.equal(dense[at : at + size])
        for key in contract.feature_names:
            assert block_sparse[key].lengths().equal(sparse[key].lengths()[at : at + size])
        at += size
    assert at == ROWS


def test_ranks_together_parse_every_row_once(files: dict[str, Path], columns: dict[str, np.ndarray]) -> None:
    seen: list[str] = []
    for rank in range(3):
        stream = RowStream(files["tsv"])
        for block in stream.blocks(20, keep=lambda first, rows, rank=rank: np.arange(rank, rows, 3)):
            seen += list(block["C1"])
    assert sorted(seen) == sorted(columns["C1"])


def test_the_limit_counts_over_all_files(files: dict[str, Path], columns: dict[str, np.ndarray]) -> None:
    blocks = list(RowStream(files["folder"], limit=95).blocks(30))
    assert [len(b[LABEL]) for b in blocks] == [30, 30, 30, 5]
    assert whole(blocks)["C26"] == list(columns["C26"][:95])


def test_movielens_rows_come_with_their_user_and_item(tmp_path: Path) -> None:
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n1\t5\t4\n2\t6\t3\n1\t6\t5\n")
    (tmp_path / "a.user").write_text("user_id:token\tgender:token\n1\tF\n")
    expected = read_movielens(tmp_path / "a.inter")
    for name in ("a.inter", "a.item", "a.user"):  # a packed file finds its sides, packed or not
        if (tmp_path / name).exists():
            (tmp_path / f"b{name[1:]}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    (tmp_path / "c.inter.gz").write_bytes((tmp_path / "b.inter.gz").read_bytes())
    for name in ("a.item", "a.user"):
        if (tmp_path / name).exists():
            (tmp_path / f"c{name[1:]}").write_bytes((tmp_path / name).read_bytes())
    for name in ("b.inter.gz", "c.inter.gz"):
        assert {n: list(v) for n, v in read_movielens(tmp_path / name).items()} == {
            n: list(v) for n, v in expected.items()
        }
        assert next(RowStream(tmp_path / name, "movielens").blocks(2)).keys() == expected.keys()
    blocks = list(RowStream(tmp_path / "a.inter", "movielens").blocks(2))
    assert whole(blocks) == {name: list(values) for name, values in expected.items()}
    assert whole(blocks)["gender"] == ["F", "", "F"]


def test_held_out_rows_depend_on_the_seed_alone() -> None:
    rows = np.arange(20_000)
    mask = held_out_mask(rows, 0.1, seed=4)
    assert abs(mask.mean() - 0.1) < 0.01
    assert (held_out_mask(rows[500:600], 0.1, seed=4) == mask[500:600]).all()
    assert (held_out_mask(rows, 0.1, seed=5) != mask).any()


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file to read"):
        RowStream(tmp_path / "none.csv")
    with pytest.raises(InputError, match="no file to read"):
        RowStream(tmp_path)
    with pytest.raises(ConfigError, match="criteo, movielens"):
        RowStream(tmp_path, "xml")
    short = tmp_path / "short.tsv"
    short.write_text("\t".join(["1"] * 40) + "\n" + "\t".join(["1"] * 39) + "\n")
    with pytest.raises(InputError, match=r"short\.tsv: a row has 39 fields, expected 40"):
        list(RowStream(short).blocks(10))
    cut = tmp_path / "cut.tsv.gz"
    cut.write_bytes(gzip.compress(("\t".join(["1"] * 40) + "\n").encode() * 5000)[:-40])
    with pytest.raises(InputError, match=r"cut\.tsv\.gz: the compressed data is cut off"):
        list(RowStream(cut).blocks(10))
