"""Traces: both file forms, errors by line, and scaling to another rate."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from recinfer.errors import InputError, NotFoundError
from recinfer.sizing.arrivals import Trace, poisson, read_trace


def wrote(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_json_lines_and_csv_say_the_same(tmp_path: Path) -> None:
    lines = (
        '{"time": 10.5, "batch": 2, "ids": {"a": 4, "b": 2}}\n\n{"time": 10.75, "batch": 1, "ids": {"a": 1, "b": 2}}\n'
    )
    table = "time,batch,ids.a,ids.b\n10.5,2,4,2\n10.75,1,1,2\n"
    a = read_trace(wrote(tmp_path, "t.jsonl", lines))
    b = read_trace(wrote(tmp_path, "t.csv", table))
    packed = []
    for name in ("t.jsonl", "t.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        packed.append(read_trace(tmp_path / f"{name}.gz"))
        (tmp_path / f"cut.{name}.gz").write_bytes((tmp_path / f"{name}.gz").read_bytes()[:-9])
        with pytest.raises(InputError, match=rf"cut\.{name}\.gz: the compressed data is cut off"):
            read_trace(tmp_path / f"cut.{name}.gz")
    for trace in (a, b, *packed):
        assert trace.times.tolist() == [0.0, 0.25]
        assert trace.batches.tolist() == [2, 1]
        assert trace.ids.tolist() == [6, 3]
        assert trace.ids_by_feature == {"a": pytest.approx(5 / 3), "b": pytest.approx(4 / 3)}
    assert a.qps == pytest.approx(4.0)
    assert a.ids_per_sample == 3.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.jsonl", "", "no requests"),
        ("t.jsonl", '{"time": 1}\nnonsense', "line 2: not JSON"),
        ("t.jsonl", '{"time": 1, "size": 3}', "line 1: expected an object of time, batch and ids"),
        ("t.jsonl", '{"batch": 1}', "line 1: time: got None"),
        ("t.jsonl", '{"time": "soon"}', "line 1: time: got 'soon'"),
        ("t.jsonl", '{"time": 2}\n{"time": 1}', "line 2: time 1 is less than on the line before"),
        ("t.jsonl", '{"time": 1, "batch": 0}', "batch: got 0, expected a whole number of at least 1"),
        ("t.jsonl", '{"time": 1, "batch": true}', "batch: got True"),
        ("t.jsonl", '{"time": 1, "ids": -1}', "ids: got -1"),
        ("t.jsonl", '{"time": NaN}', "time: got nan"),
        ("t.jsonl", '{"time": 0, "batch": 1e30}', "batch: got 1e+30, expected a whole number of at most 2,147,483,647"),
        ("t.jsonl", '{"time": 0, "ids": {"a": 1e300}}', "ids of 'a': got 1e+300, expected a whole number of at most"),
        ("t.jsonl", '{"time": 1e300}', "time: got 1e+300, expected a number of at most"),
        ("t.csv", "time,batch\n1,2\n1," + "3" * 200_000, "line 3: field larger than field limit"),
        ("t.csv", "", "line 1: got the columns []"),
        ("t.csv", "when,batch\n1,2\n", "line 1: got the columns"),
        ("t.csv", "time,batch\n1\n", "line 2: got 1 cells, expected 2"),
        ("t.csv", "time,batch\n1,1.5\n", "line 2: batch: got '1.5', expected a whole number"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(wrote(tmp_path, name, text))
    assert says in str(caught.value)


def test_a_file_of_a_spreadsheet(tmp_path: Path) -> None:
    """It begins with a byte order mark."""
    assert read_trace(wrote(tmp_path, "t.csv", "\ufefftime,batch\r\n1,2\r\n")).batches.tolist() == [2]


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read trace"):
        read_trace(tmp_path)


def test_no_such_trace(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no trace"):
        read_trace(tmp_path / "none.csv")


def test_another_rate_keeps_the_pattern_and_the_sizes() -> None:
    random = np.random.default_rng(0)
    gaps = np.where(random.random(5000) < 0.9, 0.001, 0.1)  # bursts
    times = np.cumsum(gaps) - gaps[0]
    batches = random.integers(1, 9, 5000)
    trace = Trace(times, batches, batches * 3, {})
    for count in (2000, 5000, 12_000):
        other = trace.at_rate(50.0, count, seed=1)
        assert len(other) == count
        assert other.qps == pytest.approx(50.0, rel=0.02)
        assert other.ids.sum() == 3 * other.batches.sum()
        steps = np.diff(other.times)
        assert np.std(steps) / np.mean(steps) > 2  # still in bursts
    assert (trace.at_rate(50.0, 1000, seed=1).times == trace.at_rate(50.0, 1000, seed=1).times).all()


def test_a_trace_of_one_moment_is_spread_evenly() -> None:
    trace = Trace(np.zeros(3), np.ones(3, np.int64), np.ones(3, np.int64), {})
    assert trace.at_rate(10.0, 5).times == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(("qps", "count", "batch"), [(0.0, 5, 1), (float("inf"), 5, 1), (1.0, 0, 1), (1.0, 5, 0)])
def test_generated_requests_need_valid_figures(qps: float, count: int, batch: int) -> None:
    with pytest.raises(InputError):
        poisson(qps, count, batch=batch)
