"""Sizing by the command line: capacity of a real server, hosts from measured figures, and errors."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from recinfer.serving import server_process
from recinfer.serving.server.server import Server
from recinfer.sizing import capacity
from recinfer.sizing.capacity import Measured
from tests.e2e.commands import run, run_json
from tests.serving.conftest import archive, predictor, server  # noqa: F401
from tests.sizing.simulated import QueueDriver
from tests.sizing.test_capacity import measured
from tests.warm import starting_warm

SHORT = ("--seconds", 0.2, "--max-qps", 25, "--p99-ms", 20_000)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement is longer than --seconds says; these tests do not look at the figures."""
    monkeypatch.setattr(capacity, "_FEWEST", 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with server.json and sharded.json, what was measured of a queue, and hosts.json."""
    folder = tmp_path_factory.mktemp("size")
    found = measured(QueueDriver(1e-3, 1e-3), 20e-3)
    found = replace(found, model="tiny", machine={**found.machine, "cores": 4})
    found.save(folder / "server.json")
    replace(found, what="ranker and shard").save(folder / "sharded.json")
    hosts = [{"name": "four", "cores": 4, "memory_gib": 8, "price": 1.0}]
    (folder / "hosts.json").write_text(json.dumps({"format": "recinfer.hosts", "version": 1, "hosts": hosts}))
    return folder


@pytest.fixture
def options(archive: Path, files: Path) -> list[object]:  # noqa: F811
    return ["size", "--archive", archive, "--capacity", files / "server.json", "--hosts", files / "hosts.json"]


# --------------------------------------------------------------------------------------------------- bench capacity


def test_a_running_server_is_measured(server: Server, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "capacity.json", tmp_path / "capacity.png"
    target = f"127.0.0.1:{server.port}"
    found = run_json("bench", "capacity", "--target", target, *SHORT, "--out", out, "--plot", plot)
    assert (found["knee_qps"], found["knee_is_at_least"], found["call"]) == (25.0, True, "predict")
    assert all(rate["kept"] for rate in found["rates"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert Measured.load(out).model == found["model"]
    code, text, err = run("bench", "capacity", "--target", target, *SHORT, "--call", "lookup")
    assert code == 0, err
    assert "knee: at least 25 requests/s" in text


@pytest.mark.parametrize("more", [(), ("--sharded",)])
def test_a_server_of_an_archive_is_started_measured_and_stopped(archive: Path, more: tuple[str, ...]) -> None:  # noqa: F811
    # One server starts as a user's does, a ranker and its shard from what is imported already.
    with starting_warm(server_process) if more else nullcontext():
        found = run_json("bench", "capacity", archive, *SHORT, *more)
    assert found["knee_qps"] == 25.0
    assert found["what"] == ("ranker and shard" if more else "server")
    expected = {"ranker", "shard", "driver"} if more else {"server", "driver"}
    assert set(found["cpu_s_per_request"]) == expected


def test_an_objective_that_no_rate_meets_exits_with_1(server: Server) -> None:  # noqa: F811
    target = f"127.0.0.1:{server.port}"
    code, out, _ = run("bench", "capacity", "--target", target, "--seconds", 0.2, "--p99-ms", 0.01)
    assert code == 1
    assert "no rate meets the objective: a request on an idle server takes" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either ARCHIVE"),
        (("none.rqa", "--target", "127.0.0.1:1"), "give either ARCHIVE"),
        (("none.rqa",), "none.rqa"),
        (("--target", "127.0.0.1:1"), "127.0.0.1:1"),
        (("--target", "127.0.0.1:1", "--out", "/nonexistent/x.json"), "--out"),
        (("--target", "127.0.0.1:1", "--plot", "x.txt"), ".txt"),
    ],
)
def test_what_cannot_be_measured_is_named(arguments: tuple[str, ...], says: str) -> None:
    with starting_warm(server_process):
        error = run_json("bench", "capacity", "--p99-ms", 10, *arguments, code=2)["error"]
    assert says in error["message"]


# --------------------------------------------------------------------------------------------------- size


def test_the_table_marks_the_chosen_one(options: list[object]) -> None:
    code, out, err = run(*options, "--qps", 1500, "--price", "four=2.5")
    assert code == 0, err
    assert "1,500 requests/s, p99 within 20 ms" in out
    (chosen,) = (line for line in out.splitlines() if "->" in line)
    assert all(text in chosen for text in ("four", "yes"))
    assert "four hosts, each with all tables: " in out
    assert "are examples" not in err
    assert "measured on 4 cores" in err


def test_json_says_the_same_each_time(options: list[object]) -> None:
    first, again = run_json(*options, "--qps", 1500), run_json(*options, "--qps", 1500)
    assert first == again
    assert first["chosen"] == first["deployments"][0]
    assert first["chosen"]["meets"]
    assert first["chosen"]["p99_ms"] <= 20


def test_shards_are_computed_from_a_ranker_and_one_shard(options: list[object], files: Path) -> None:
    code, out, err = run(*options, "--capacity", files / "sharded.json", "--qps", 1500, "--shards", 4)
    assert code == 0, err
    assert "4 shards x" in out
    assert "the model gives p99" in err


def test_no_kind_of_host_meets_the_objective(options: list[object]) -> None:
    found = run_json(*options, "--qps", 1e6, "--max-hosts", 10, code=1)
    assert found["chosen"] is None
    code, out, _ = run(*options, "--qps", 1e6, "--max-hosts", 10)
    assert code == 1
    assert "no kind of host meets the objective" in out
    assert " hosts, more than --max-hosts 10" in out


def test_without_a_file_the_capacity_is_measured(archive: Path, files: Path) -> None:  # noqa: F811
    asked = ["size", "--archive", archive, "--hosts", files / "hosts.json", "--qps", 5]
    with starting_warm(server_process):
        found = run_json(*asked, "--p99-ms", 0.01, "--seconds", 0.2, code=1)
    assert found["deployments"][0]["why_not"] == "no rate met the objective"
    assert [each["what"] for each in found["measured"]] == ["server"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "--qps"),
        (("--qps", 10, "--price", "five=1"), "--price"),
        (("--qps", 10, "--hosts", "none.json"), "none.json"),
        (("--qps", 10, "--capacity", "none.json"), "none.json"),
        (("--qps", 10, "--p99-ms", 5), "its knee is for a p99 within 20 ms, not 5"),
        (("--trace", "none.jsonl"), "none.jsonl"),
        (("--qps", 10, "--plot", "/nonexistent/x.png"), "--plot"),
    ],
)
def test_what_is_missing_is_named(options: list[object], more: tuple[object, ...], says: str) -> None:
    assert says in run_json(*options, *more, code=2)["error"]["message"]


def test_two_files_of_one_kind_or_of_another_model(options: list[object], files: Path, tmp_path: Path) -> None:
    again = run_json(*options, "--qps", 10, "--capacity", files / "server.json", code=2)["error"]["message"]
    assert "two files measure a server" in again
    other = tmp_path / "other.json"
    replace(Measured.load(files / "sharded.json"), model="other").save(other)
    assert "it measures model other" in run_json(*options, "--qps", 10, "--capacity", other, code=2)["error"]["message"]


def test_help_has_an_example() -> None:
    for verb, example in (("size",), "recinfer size --archive"), (("bench", "capacity"), "recinfer bench capacity"):
        code, out, _ = run(*verb, "--help")
        assert code == 0
        assert f"Example: {example}" in " ".join(out.split())


def test_calibrate_needs_a_file() -> None:
    code, _, err = run("calibrate")
    assert code == 2
    assert "--out" in err
