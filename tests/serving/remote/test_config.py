"""Errors of shards.json and the command line; refusal of messages and ids that do not fit."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.errors import ConfigError, InputError
from recinfer.serving.shards.config import ShardsSettings, read_shards
from recinfer.serving.shards.messages import decode_response, encode_response
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import shards_pb2 as pb
from tests.serving.remote.fleet import write_shards
from tests.serving.remote.models import make_archive as make_mixed

GOOD = {"format": "recinfer.shards", "version": 1, "ranks": {"0": ["10.0.0.1:50051", "dns:///shard-0.recinfer:50051"]}}


def test_a_good_file(tmp_path: Path):
    path = tmp_path / "shards.json"
    path.write_text(json.dumps({**GOOD, "settings": {"hedge_budget": 0.05, "missing": "default_rows"}}))
    config = read_shards(path)
    assert config.ranks == {0: ("10.0.0.1:50051", "dns:///shard-0.recinfer:50051")}
    assert config.settings == ShardsSettings(hedge_budget=0.05, missing="default_rows")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "format: got 'other'; expected 'recinfer.shards'"),
        ({"version": 2}, "version 2; expected"),
        ({"more": 1}, "unknown \\['more'\\]"),
        ({"ranks": {}}, "expected an object of rank"),
        ({"ranks": {"0": "a:1"}}, "ranks.0: got 'a:1'; expected a list"),
        ({"ranks": {"one": ["a:1"]}}, "got 'one', expected a number"),
        ({"ranks": {"01": ["a:1"]}}, "got '01', expected a number"),
        ({"ranks": {"9" * 5000: ["a:1"]}}, "got '9999*', expected a number"),
        ({"ranks": {"0": []}}, "rank 0: got no address"),
        ({"ranks": {"0": ["a"]}}, "got 'a', expected host:port"),
        ({"ranks": {"0": ["a:99999"]}}, "got 'a:99999', expected host:port"),
        ({"ranks": {"0": ["a:1", "a:1"]}}, "stands there twice"),
        ({"settings": {"hedges": True}}, "unknown \\['hedges'\\]"),
        ({"settings": {"hedge_budget": 2}}, "hedge_budget: got 2.0, expected a number from 0 to 1"),
        ({"settings": {"hedge": "yes"}}, "hedge: got 'yes'"),
        ({"settings": {"missing": "zero"}}, "missing: got 'zero'"),
    ],
)
def test_a_bad_file(tmp_path: Path, change: dict[str, Any], says: str):
    path = tmp_path / "shards.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=says):
        read_shards(path)


def test_a_setting_that_has_no_effect_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "shards.json"
    for half in (True, False):
        path.write_text(json.dumps({**GOOD, "settings": {"half": half, "timeout_seconds": 2}}))
        assert read_shards(path).settings == ShardsSettings(timeout_seconds=2)
        assert ("the setting half has no effect any more" in caplog.text) is half
        caplog.clear()


def test_no_file_and_no_json(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_shards(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="not acceptable JSON"):
        read_shards(tmp_path / "x.json")


def serve(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments), "--port", "0"])
    assert result.exit_code == 2
    return result.output


def test_the_command_line(archive: Path, tmp_path: Path):
    two = write_shards(tmp_path / "two.json", {0: ["127.0.0.1:1"], 1: ["127.0.0.1:1"]})
    three = write_shards(tmp_path / "three.json", {0: ["127.0.0.1:1"], 1: ["127.0.0.1:1"], 2: ["127.0.0.1:1"]})
    assert "got --ranks and --shards" in serve(archive, "--ranks", "0", "--shards", two)
    assert "the archive has 2 ranks, 0 to 1" in serve(archive, "--ranks", "0,5")
    assert "--ranks: got 'x'" in serve(archive, "--ranks", "x")
    assert "expected numbers below 65536" in serve(
        archive, "--ranks", "0-99999999999"
    )  # no list of that length is made
    assert "expected numbers below 65536" in serve(archive, "--ranks", "3-1")
    assert "it lists ranks 0, 1, 2" in serve(archive, "--shards", three)
    assert "give --shards" in serve(archive, "--missing-shards", "default-rows")
    said = serve(archive, "--shards", two, "--missing-shards", "default-rows")
    assert "does not allow default rows" in said and "reshard it with" in said
    assert "a shard server serves rankers only" in serve(archive, "--ranks", "0", "--workers", 2)
    assert "give --ranks" in serve(archive, "--socket-port", 5)
    assert "nothing to serve" in serve("--ranks", "0")


def test_responses_of_any_alignment():
    arrays = [[np.arange(n, dtype=np.float32)] for n in (0, 1, 40, 3000, 70_000, 2)]
    found = decode_response(encode_response(arrays))
    for got, (expected,) in zip(found, arrays, strict=True):
        assert got.flags.aligned and np.array_equal(got, expected)
    data = encode_response(arrays)
    for broken in (data[:-1], data[:5], b"\x08\x01", b"\xff" * 12):
        with pytest.raises(InputError, match="response"):
            decode_response(broken)


def test_parts_that_do_not_fit_are_refused(archive: Path):
    tables = ShardTables((0, 1))
    key = tables.add(archive)
    mine = next(iter(tables._versions[key].tables.items()))
    (rank, module), table = mine
    streams = table.num_streams
    good = np.zeros(streams, np.int32).tobytes()

    def ask(**part: Any) -> bytes:
        parts = [pb.ShardPart(**{"rank": rank, "module": module, "ids": good, **part})]
        return tables.find(pb.ShardRequest(version=key, batch_size=1, parts=parts).SerializeToString(), Limits())

    assert ask()
    for wrong, says in (
        ({"rank": 7}, "rank 7"),
        ({"ids": good[4:]}, "expected one for each"),
        ({"ids": good[:-4] + b"\xff\xff\xff\x7f"}, "beyond the rows"),
        ({"ids": good[:-4] + b"\xfe\xff\xff\xff"}, "beyond the rows"),
        ({"length_bytes": 3, "lengths": b"1"}, "lengths: got"),
        ({"length_bytes": 1, "lengths": b"\x09" * streams}, "add up"),
        ({"weights": b"\0\0\0\0"}, "weights: got"),
    ):
        with pytest.raises(InputError, match=says):
            ask(**wrong)


@pytest.mark.parametrize("length_bytes", [1, 4])
def test_an_answer_beyond_the_bound_is_refused_before_it_is_made(tmp_path: Path, length_bytes: int):
    """One byte of lengths requests a whole vector, so a message within its limit could fill the memory."""
    tables = ShardTables((0, 1, 2))
    key = tables.add(make_mixed(tmp_path, "table_wise"))
    batch, limits = 100_000, Limits(max_response_bytes=200_000)
    kinds = set()
    for (rank, module), table in tables._versions[key].tables.items():
        kinds.add(table._pooled)
        lengths = bytes(batch * table.num_streams * length_bytes)
        part = pb.ShardPart(rank=rank, module=module, length_bytes=length_bytes, lengths=lengths)
        data = pb.ShardRequest(version=key, batch_size=batch, parts=[part]).SerializeToString()
        tracemalloc.start()
        try:
            with pytest.raises(InputError, match="max_response_bytes = 200000"):
                tables.find(data, limits)
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + 100_000
        finally:
            tracemalloc.stop()
    assert kinds == {True, False}


def test_the_bound_of_an_answer_counts_all_parts_of_a_rank(tmp_path: Path):
    tables = ShardTables((0, 1, 2))
    key = tables.add(make_mixed(tmp_path, "row_wise"))
    (rank, module), table = next(iter(tables._versions[key].tables.items()))
    size = 4 * table.columns
    others = [other for other, number in tables._versions[key].tables if number == module]

    def ask(ranks: list[int]) -> bytes:
        ids = bytes(4 * table.num_streams)
        parts = [pb.ShardPart(rank=rank, module=module, ids=ids) for rank in ranks]
        data = pb.ShardRequest(version=key, batch_size=1, parts=parts).SerializeToString()
        return tables.find(data, Limits(max_response_bytes=3 * size))

    assert ask([rank] * 3)
    assert len(others) == 3 and ask(others * 3), "each rank's part of a request may be as large"
    with pytest.raises(InputError, match=f"rank {rank}: 1 samples take {4 * size} bytes or more"):
        ask([rank] * 4)


def test_a_shard_server_has_the_limits_that_it_is_given(archive: Path, monkeypatch: pytest.MonkeyPatch):
    """A ranker with --max-message-mib needs shard servers with it too: its parts of a request can be as long."""
    taken: list[Limits] = []
    monkeypatch.setattr("recinfer.serving.server.run.serve", lambda server, **_: taken.append(server._limits))
    done = CliRunner().invoke(app, ["serve", str(archive), "--ranks", "0", "--max-message-mib", "512"])
    assert done.exit_code == 0, done.output
    assert taken == [Limits(max_message_bytes=512 << 20)]
