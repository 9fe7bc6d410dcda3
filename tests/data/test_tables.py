"""Text tables: round trips, comparison with the csv module, and errors that name broken files."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recinfer.data.tables import read_csv, read_table, write_csv
from recinfer.errors import InputError

FIELD = st.text(st.characters(exclude_characters="\0\r", exclude_categories=("Cs",)), max_size=12)


def lists(columns: dict[str, object]) -> dict[str, list[str]]:
    return {name: list(values) for name, values in columns.items()}  # type: ignore[call-overload]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(FIELD, min_size=n, max_size=n), max_size=8)))
def test_written_columns_are_read_back(tmp_path: Path, rows: list[list[str]]) -> None:
    names = [f"c{i}" for i in range(len(rows[0]) if rows else 2)]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    write_csv(tmp_path / "t.csv", columns)
    assert lists(read_csv(tmp_path / "t.csv", ",")) == columns


def test_numbers_and_none_are_written_as_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", {"a": [1, 2.0, None], "b": [1.5, float("nan"), "x,y"]})
    assert lists(read_csv(tmp_path / "t.csv")) == {"a": ["1", "2", ""], "b": ["1.5", "", "x,y"]}


def test_a_tab_in_the_header_makes_it_a_tab_table_without_quotes(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text('a\tb\n"x\t1,5\n\n', encoding="utf-8")
    assert lists(read_csv(tmp_path / "t.tsv")) == {"a": ['"x'], "b": ["1,5"]}


def test_a_byte_order_mark_windows_lines_and_a_missing_last_line_end(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("\ufeffa,b\r\n1,2\r\n3,4".encode())
    assert lists(read_csv(tmp_path / "t.csv")) == {"a": ["1", "3"], "b": ["2", "4"]}


@pytest.mark.parametrize("limit", [0, 1, 4, 5, 9, None])
def test_many_chunks_and_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr("recinfer.data.tables._CHUNK_ROWS", 2)
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([["a"], *([str(i)] for i in range(7))])
    assert list(read_csv(tmp_path / "t.csv", ",", limit)["a"]) == [str(i) for i in range(7)][:limit]


def test_only_a_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n")
    assert lists(read_csv(tmp_path / "t.csv")) == {"a": [], "b": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the header line is \\[\\]"),
        (b"a,,c\n1,2,3\n", "expected a name for each column"),
        (b"a,b,a\n1,2,3\n", "duplicate columns a"),
        (b"196,242,3,0,0\n1,2,3,4,5\n", "looks like data; expected a header"),
        (b"a,b\n1,2\n3\n4,5\n", "row 1 has 1 fields, expected 2: 3"),
        (b"a,b\n" + b"1,2\n" * (1 << 16) + b"\n1,2\n3\n", f"row {(1 << 16) + 1} has 1 fields, expected 2: 3"),
        (b"a,b\n1,2,3\n", "has 3 fields, expected 2: 1,2,3"),
        (b"a,b\n1,\xff\n", "is not UTF-8"),
        (b"\x89PNG\xff", "is not UTF-8"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"t\.csv: .*" + message):
        read_csv(tmp_path / "t.csv")


def test_names_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("1\t2\n3\t4\n")
    assert lists(read_table(tmp_path / "t.tsv", "\t", ["x", "y"])) == {"x": ["1", "3"], "y": ["2", "4"]}
    with pytest.raises(InputError, match="expected 3"):
        read_table(tmp_path / "t.tsv", "\t", ["x", "y", "z"])


def test_columns_of_different_lengths_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="columns differ in rows"):
        write_csv(tmp_path / "t.csv", {"a": [1], "b": [1, 2]})
    assert not (tmp_path / "t.csv").exists()


def test_a_packed_table_is_read_and_written(tmp_path: Path) -> None:
    columns = {"a": ["1", "x,y"], "b": ["", "é"]}
    write_csv(tmp_path / "t.csv.gz", columns)
    assert lists(read_csv(tmp_path / "t.csv.gz")) == columns
    write_csv(tmp_path / "t.csv", columns)
    assert gzip.decompress((tmp_path / "t.csv.gz").read_bytes()) == (tmp_path / "t.csv").read_bytes()


@pytest.mark.parametrize("stop", [0, 5, -9, -3])
def test_a_packed_table_that_is_cut_off_is_named(tmp_path: Path, stop: int) -> None:
    text = "a,b\n" + "".join(f"{at},{at * at}\n" for at in range(5000))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode())[:stop] or b"a,b\n")
    with pytest.raises(InputError, match=r"t\.csv\.gz: the compressed data is cut off or damaged"):
        read_csv(tmp_path / "t.csv.gz")
