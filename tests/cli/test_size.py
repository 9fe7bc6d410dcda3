"""Sizing by the command line: the table and its chosen line, JSON, pictures, traces, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recinfer.sizing.arrivals import read_trace
from recinfer.sizing.sample import write_sample_archive
from tests.e2e.commands import run, run_json
from tests.sizing.models import COSTS


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_archive(tmp_path_factory.mktemp("size"), tables=((500, 8),) * 4)


@pytest.fixture(scope="module")
def options(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("options")
    COSTS.save(folder / "serving.json")
    hosts = [{"name": "four", "cores": 4, "memory_gib": 8, "price": 1.0}]
    (folder / "hosts.json").write_text(json.dumps({"format": "recinfer.hosts", "version": 1, "hosts": hosts}))
    return [
        *("size", "--archive", archive, "--serving", folder / "serving.json", "--hosts", folder / "hosts.json"),
        *("--requests", 1000, "--precision", "int8"),
    ]


def test_the_table_marks_the_chosen_one(options: list[object]) -> None:
    code, out, err = run(*options, "--qps", 1500, "--p99-ms", 20, "--price", "four=2.5")
    assert code == 0, err
    assert "1,500 Predict a second of sample, p99 within 20 ms" in out
    (chosen,) = (line for line in out.splitlines() if "->" in line)
    assert all(text in chosen for text in ("four", "int8", "5.00", "keeps it"))
    assert "2 four hosts, each with all tables, int8, 3 workers a host: p50" in out
    assert "made up" not in err
    assert "typical" not in err


def test_json_says_the_same_each_time(options: list[object]) -> None:
    asked = [*options, "--qps", 1500, "--p99-ms", 20, "--call", "lookup", "--seed", 3]
    first, again = run_json(*asked), run_json(*asked)
    assert first.pop("seconds") > 0
    again.pop("seconds")
    assert first == again
    assert first["chosen"] == first["candidates"][0]
    assert first["chosen"]["meets"]
    assert first["chosen"]["p99_ms"] <= 20


def test_a_promise_that_cannot_be_kept_ends_with_one(options: list[object]) -> None:
    found = run_json(*options, "--qps", 100, "--p99-ms", 0.1, code=1)
    assert found["chosen"] is None
    code, out, _ = run(*options, "--qps", 100, "--p99-ms", 0.1)
    assert code == 1
    assert "no candidate keeps it" in out


def test_where_nothing_could_be_simulated_the_reason_is_said(options: list[object]) -> None:
    code, out, _ = run(*options, "--qps", 100, "--p99-ms", 20, "--max-hosts", 1)
    assert code == 1
    assert "no candidate keeps it; why is in the last column" in out
    assert "more than 1 hosts" in out


def test_a_trace_gives_rate_and_sizes(options: list[object], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"time": i / 800, "batch": 1 + i % 4, "ids": {"f0": 2 * (1 + i % 4), "f1": 3}} for i in range(400)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    written = tmp_path / "made.csv"
    found = run_json(*options, "--trace", trace, "--p99-ms", 20, "--write-trace", written)
    assert found["qps"] == pytest.approx(800, rel=0.01)
    made = read_trace(written)
    assert len(made) == 1000
    assert made.qps == pytest.approx(800, rel=0.1)
    assert set(made.batches.tolist()) == {1, 2, 3, 4}


def test_a_picture(options: list[object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    run_json(*options, "--qps", 1500, "--p99-ms", 20, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    error = run_json(*options, "--qps", 1500, "--p99-ms", 20, "--plot", tmp_path / "curve.txt", code=2)["error"]
    assert ".txt" in error["message"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "--qps"),
        (("--qps", 10, "--price", "five=1"), "--price"),
        (("--qps", 10, "--hosts", "none.json"), "none.json"),
        (("--trace", "none.jsonl"), "none.jsonl"),
        (("--qps", 10, "--serving", "none.json"), "none.json"),
        (("--qps", 10, "--write-trace", "/nonexistent/x.csv"), "--write-trace"),
        (("--qps", 10, "--write-trace", "/"), "cannot be written"),
    ],
)
def test_what_is_missing_is_named(options: list[object], more: tuple[object, ...], says: str) -> None:
    error = run_json(*options, "--p99-ms", 20, *more, code=2)["error"]
    assert says in error["message"]


def test_a_feature_the_model_does_not_have(options: list[object], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time,ids.colour\n0,1\n1,2\n")
    error = run_json(*options, "--p99-ms", 20, "--trace", trace, code=2)["error"]
    assert "no feature colour" in error["message"]


def test_help_has_an_example() -> None:
    code, out, _ = run("size", "--help")
    assert code == 0
    assert "Example: recinfer size --archive" in out


def test_calibrate_needs_a_file() -> None:
    error = run_json("calibrate", code=2)["error"]
    assert "--serving" in error["message"]
