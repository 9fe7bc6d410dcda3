"""``recinfer predict --rows``: files of any length, row by row, and what stops it."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.cli.rows import read_rows
from recinfer.columns import as_features
from recinfer.errors import ConfigError, InputError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.bulk import batch_of
from recinfer.serving.server.server import Server
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json

ROWS: list[dict[str, Any]] = [
    {"user": [3, 9], "item": [5], "history": [], "shop": [4], "dense": [0.5, 1.0, -2.0]},
    {"user": [1], "item": [], "history": [1, 2], "shop": [6], "dense": [0.0, 0.25, 3.0]},
    {"user": [10**6], "item": [], "history": [1, 2], "shop": [6], "dense": [0.0, 0.25, 3.0]},
    {"user": [2], "item": [7], "history": [3], "shop": [8], "dense": [1.0, 1.0, 1.0]},
]


@pytest.fixture(scope="module")
def predictor(exported: Exported) -> Predictor:
    return load(exported.archive)


@pytest.fixture(scope="module")
def target(predictor: Predictor) -> Iterator[str]:
    with Server({"tiny": predictor}) as server:
        yield server.target


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(ROWS[0])
        writer.writerows([" ".join(map(str, cell)) for cell in row.values()] for row in ROWS)


def write_json_lines(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, ROWS)))


def write_parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)


def write_packed(path: Path) -> None:
    FORMATS[path.name.removesuffix(".gz")](path)
    path.write_bytes(gzip.compress(path.read_bytes()))


FORMATS = {
    "rows.csv": write_csv,
    "rows.jsonl": write_json_lines,
    "rows.parquet": write_parquet,
    "rows.csv.gz": write_packed,
    "rows.jsonl.gz": write_packed,
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_scored_in_order_and_the_bad_one_is_named(
    target: str, predictor: Predictor, tmp_path: Path, name: str
) -> None:
    FORMATS[name](tmp_path / name)
    out = tmp_path / "scores.csv"
    found = run_json(
        "predict",
        "--target",
        target,
        "--timeout",
        60,
        "--rows",
        tmp_path / name,
        "--out",
        out,
        "--batch-size",
        3,
        code=1,
    )
    assert (found["rows"], found["failed"]) == (4, 1)
    assert found["errors"][0]["row"] == 2 and "out of range" in found["errors"][0]["error"]
    written = list(csv.DictReader(out.open()))
    assert [row["row"] for row in written] == ["0", "1", "2", "3"]
    for at in (0, 1, 3):
        expected = predictor.predict(*batch_of([ROWS[at]])[:2])["output"].reshape(-1)
        torch.testing.assert_close(
            torch.tensor([float(v) for v in written[at]["output"].split()]), expected, atol=1e-5, rtol=1e-5
        )
        assert written[at]["error"] == ""
    assert written[2]["output"] == "" and "out of range" in written[2]["error"]


def test_a_context_applies_to_all_rows(target: str, predictor: Predictor, tmp_path: Path) -> None:
    shared = {"user": [3, 9], "history": [1, 2]}
    rows = [{"item": row["item"], "shop": row["shop"], "dense": row["dense"]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "user.json").write_text(json.dumps(shared))
    out = tmp_path / "scores.csv"
    options = ("predict", "--target", target, "--timeout", 60, "--rows", tmp_path / "rows.jsonl", "--out", out)
    assert run_json(*options, "--context", tmp_path / "user.json")["failed"] == 0
    dense, features, _ = batch_of(rows)
    expected = predictor.predict(dense, features, {"user": [[3, 9]], "history": [[1, 2]]})["output"]
    written = [float(row["output"]) for row in csv.DictReader(out.open())]
    torch.testing.assert_close(torch.tensor(written), expected.reshape(-1), atol=1e-5, rtol=1e-5)
    for text, says in (
        ("[1]", "got list, expected an object"),
        ('{"dense": [1]}', "the rows have them"),
        ("{", "user.json: no JSON"),
    ):
        (tmp_path / "user.json").write_text(text)
        code, _, error = run(*options, "--context", tmp_path / "user.json")
        assert code == 2
        assert says in " ".join(error.split())


def test_one_of_input_and_rows(target: str, tmp_path: Path) -> None:
    for options in ([], ["--rows", tmp_path / "a.csv", "--input", tmp_path / "b.json"]):
        assert "--rows" in run_json("predict", "--target", target, *options, code=2)["error"]["message"]


def test_lines_that_cannot_be_read_are_rows_that_failed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"user": 3, "tags": {"ids": [4], "weights": [0.5]}}\n\n[1]\n{"user"\n{"a": {"b": 1}}\n'
    )
    first, *wrong = read_rows(tmp_path / "a.jsonl")
    assert first == {"user": 3, "tags": ([4], [0.5])}
    assert [type(one) for one in wrong] == [InputError] * 3 and "line 3: got list" in str(wrong[0])
    assert str(wrong[1]) == "line 4: got text that is not JSON (Expecting ':' delimiter, character 8)"
    (tmp_path / "a.csv").write_text("user,dense\n3:0.5 7,1 2\nx,1\n1\n4,\n")
    first, *wrong, last = read_rows(tmp_path / "a.csv")
    assert first == {"user": ([3, 7], [0.5, 1.0]), "dense": [1.0, 2.0]} and last == {"user": [4], "dense": []}
    assert [str(one) for one in wrong] == [
        "line 3: column 'user': got 'x', expected ids separated by spaces, as in 3 7, or with weights 3:0.5 7:2",
        "line 4: got another number of cells than the header has, 2",
    ]
    with pytest.raises(ConfigError, match=r"unknown suffix '.txt'"):
        read_rows(tmp_path / "a.txt")
    with pytest.raises(OSError):
        read_rows(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the first line is empty"),
        ("\nuser\n3\n", "the first line is empty"),
        ("user,shop,user\n1,2,3\n", "got column 'user' more than once"),
        ('"user"x,shop\n1,2\n', "line 1: "),
    ],
)
def test_a_csv_file_needs_a_header_with_each_name_once(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=says):
        read_rows(tmp_path / "a.csv")


@pytest.mark.parametrize("cell", ["1_0", "3 1_0", "3:1_0", "\u0663"])
def test_only_plain_numbers_are_ids_and_weights(tmp_path: Path, cell: str) -> None:
    (tmp_path / "a.csv").write_text(f"user,shop\n{cell},1\n", encoding="utf-8")
    [wrong] = read_rows(tmp_path / "a.csv")
    assert isinstance(wrong, InputError) and "expected ids separated by spaces" in str(wrong)
    (tmp_path / "a.csv").write_text("dense\n1_0\n")
    [wrong] = read_rows(tmp_path / "a.csv")
    assert isinstance(wrong, InputError) and "expected a number" in str(wrong)


@pytest.mark.parametrize("ids", [[[3, True]], [3, True], [[3], [True]]])
def test_true_is_no_id(ids: list[Any]) -> None:
    with pytest.raises(InputError, match="expected integer ids"):
        as_features({"user": ids})


def test_true_is_no_dense_number(target: str, tmp_path: Path) -> None:
    rows = [{**ROWS[0], "dense": [0.5, True, 2.0]}, ROWS[1]]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = run_json("predict", "--target", target, "--rows", tmp_path / "a.jsonl", code=1)
    assert said["errors"] == [{"row": 0, "error": "dense[0][1]: got true, expected a number"}]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_columns_that_are_no_inputs_are_kept_or_ignored(target: str, tmp_path: Path, suffix: str) -> None:
    plain, path, out = tmp_path / "plain.csv", tmp_path / f"rows{suffix}", tmp_path / "out.csv"
    write_csv(plain)
    lines = plain.read_text().splitlines()
    more = [f"id,{lines[0]},label", *(f"k{at},{line},1" for at, line in enumerate(lines[1:]))]
    text = "\n".join(more).encode()
    path.write_bytes(gzip.compress(text) if suffix == ".csv.gz" else text)
    run_json("predict", "--target", target, "--rows", plain, "--out", tmp_path / "plain-out.csv", code=1)
    options = ["--keep", "id", "--ignore", "label"]
    run_json("predict", "--target", target, "--rows", path, *options, "--out", out, code=1)
    with out.open() as file, (tmp_path / "plain-out.csv").open() as other:
        found, expected = list(csv.DictReader(file)), list(csv.DictReader(other))
    assert [row.pop("id") for row in found] == [f"k{at}" for at in range(len(expected))]
    for row in (*found, *expected):
        row["error"] = str(bool(row["error"]))  # lines have other numbers of characters
    assert found == expected
    said = run_json("predict", "--target", target, "--rows", path, "--keep", "id", code=1)
    assert "--ignore" in said["errors"][0]["error"]
    said = run_json("predict", "--target", target, "--rows", path, "--keep", "key", code=2)
    assert "no column 'key' to keep or ignore" in said["error"]["message"]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("stop", [-3, -2000])
def test_a_packed_file_that_is_cut_off_ends_with_an_error_that_names_it(tmp_path: Path, name: str, stop: int) -> None:
    line = "{}" if name == "a.csv.gz" else '{{"user": [{}]}}'
    text = "\n".join([*(["user"] if name == "a.csv.gz" else []), *(line.format(at**4) for at in range(3000)), ""])
    (tmp_path / name).write_bytes(gzip.compress(text.encode())[:stop])
    *rows, wrong = read_rows(tmp_path / name)
    assert rows == [{"user": [at**4]} for at in range(len(rows))] and rows
    assert isinstance(wrong, InputError) and f"{name}: line {len(rows) + 1 + (name == 'a.csv.gz')}: " in str(wrong)
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(InputError, match=f"{name}: line 1: the compressed data ends or is damaged"):
        raise next(iter(read_rows(tmp_path / name)))
    with pytest.raises(ConfigError, match=r"unknown suffix '.parquet.gz'"):
        read_rows(tmp_path / "a.parquet.gz")


def test_kept_columns_and_outputs_of_one_name(target: str, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain.csv", tmp_path / "out.csv.gz"
    write_csv(plain)
    lines = plain.read_text().splitlines()
    more = [f"row,output,{lines[0]}", *(f"k{at},o{at},{line}" for at, line in enumerate(lines[1:]))]
    (tmp_path / "rows.csv").write_text("\n".join(more))
    options = ["--keep", "row", "--keep", "output", "--out", out]
    run_json("predict", "--target", target, "--rows", tmp_path / "rows.csv", *options, code=1)
    header, first, *_ = gzip.decompress(out.read_bytes()).decode().splitlines()
    assert header == "row_,row,output_,output,error"
    assert first.startswith("0,k0,o0,")


@pytest.mark.parametrize(
    ("header", "says"), [("a\tb", "separated by tabs"), ("a;b", "separated by semicolons"), ("a,b,", "has no name")]
)
def test_a_header_that_no_row_can_fit_ends_the_file(tmp_path: Path, header: str, says: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,\n")
    with pytest.raises(InputError, match=says):
        read_rows(tmp_path / "a.csv")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_named(target: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv")
    said = run_json("predict", "--target", target, "--rows", tmp_path / "rows.csv", "--out", "/dev/full", code=2)
    assert "/dev/full" in said["error"]["message"] and "No space left" in said["error"]["message"]


@pytest.mark.parametrize("option", ["--rows", "--input"])
def test_scores_do_not_replace_the_rows(target: str, tmp_path: Path, option: str) -> None:
    path = tmp_path / "rows.csv"
    write_csv(path)
    before = path.read_bytes()
    (tmp_path / "same.csv").symlink_to(path)
    said = run_json("predict", "--target", target, option, path, "--out", tmp_path / "same.csv", code=2)
    assert "give another file" in said["error"]["message"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_name_and_odd_bytes_fail_their_row_only(
    tmp_path: Path, name: str
) -> None:
    lines = {"a.csv": b"user\n3\n\xff\n4\n", "a.jsonl": b'{"user": [3]}\n{"\xff": 1\n{"user": [4]}\n'}
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + lines[name])
    first, wrong, last = read_rows(tmp_path / name)
    assert (first, last) == ({"user": [3]}, {"user": [4]}) and isinstance(wrong, InputError)


def test_names_need_no_locale_that_has_them(target: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"näme": [1], "dense": [0.0, 0.0, 0.0]}))
    command = [sys.executable, "-m", "recinfer", "predict", "--target", target, "--timeout", "60"]
    command += ["--rows", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "scores.csv")]
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ascii_only, check=False)
    assert (done.returncode, "n\\xe4me" in done.stdout, done.stderr) == (1, True, "\n"), done.stdout
    assert "näme" in (tmp_path / "scores.csv").read_text(encoding="utf-8")


def test_ctrl_c_stops_it_with_what_was_written_kept(target: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")  # a file that never ends: opening it for reading and writing keeps it open
    held = os.open(tmp_path / "rows.jsonl", os.O_RDWR)
    out = tmp_path / "scores.csv"
    command = [
        sys.executable,
        "-m",
        "recinfer",
        "predict",
        "--target",
        target,
        "--batch-size",
        "1",
        "--concurrency",
        "1",
    ]
    command += ["--rows", str(tmp_path / "rows.jsonl"), "--out", str(out)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # The file's content shows in full buffers: enough rows for some of them.
        for _ in range(400):
            os.write(held, (json.dumps(ROWS[0]) + "\n").encode())
        end = time.monotonic() + 100
        while not (out.exists() and out.stat().st_size) and time.monotonic() < end and running.poll() is None:
            os.write(held, (json.dumps(ROWS[0]) + "\n").encode())
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=100)
    finally:
        running.kill()
        os.close(held)
    assert running.returncode == 130 and "interrupted" in errors and "Traceback" not in errors, errors
    assert out.read_text().startswith("row,output,error")
