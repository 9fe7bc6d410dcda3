"""Malformed answers of shards: each is a failed attempt, and another replica gets the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from recinfer.errors import UnavailableError
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.wire import codec
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.remote.test_direct import make_archive, make_request, service_of
from tests.serving.remote.test_fan_out import later, ranking, replicated
from tests.waiting import until

MALFORMED = {
    "no whole float": b"\x0a\x05\x01\x02\x03\x04\x05",
    "a field that ends too late": b"\x0a\x05\x01",
    "a failure that is none": b"\x1a\x05\x01\x02\x03\x04\x05",
    "nothing": b"",
    "too few rows": b"\x0a\x04\x01\x02\x03\x04" * 3,
    "too few parts": b"\x0a\x04\x01\x02\x03\x04",
    "packed rows that are none": b"\x12\x01\x07" * 3,
}


def answering(server: ShardServer, answer: bytes) -> None:
    """Have a shard answer every lookup with ``answer``."""
    server.tables.find = lambda data, limits: answer  # type: ignore[method-assign]


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("samples", [4, 3_000], ids=["from bytes", "decoded"])
def test_without_another_replica_the_request_is_unavailable_at_once(tmp_path: Path, answer: bytes, samples: int):
    archive = make_archive(tmp_path, "row_wise")
    with shard(archive, (0, 1, 2)) as server:
        path = write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})
        with asking(path) as fan_out, ranking(service_of(archive, fan_out)) as (_, client):
            answering(server, answer)
            with pytest.raises(
                UnavailableError, match=f"rank 0 has no living replica: {server.target} .*its answer is malformed"
            ):
                client.lookup(make_request(samples, longest=60 if samples > 4 else 4))
            assert all(replica.outstanding == 0 for replica in fan_out.pool.everyone())


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_another_replica_is_asked(tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch):
    archive = make_archive(tmp_path, "row_wise")
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.0)  # replicas get requests in turn
    with replicated(archive, tmp_path, hedge=False) as (service, fan_out, servers):
        data = codec.encode_lookup_request(make_request(4))
        expected, _ = later(service, "Lookup", data)
        answering(servers[0], answer)
        while not fan_out.calls["failed"]:  # they take turns
            assert later(service, "Lookup", data)[0] == expected
        until(lambda: all(replica.outstanding == 0 for replica in fan_out.pool.everyone()))


def test_a_response_that_is_too_long_ends_its_connection_and_another_replica_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive = make_archive(tmp_path, "row_wise")
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.0)
    with replicated(archive, tmp_path, hedge=False) as (service, fan_out, servers):
        data = codec.encode_lookup_request(make_request(4))
        expected, _ = later(service, "Lookup", data)
        for replica in fan_out.pool.everyone():
            replica._connection.most = 1 << 20
        answering(servers[0], bytes(2 << 20))
        while not fan_out.calls["failed"]:
            assert later(service, "Lookup", data)[0] == expected
        until(lambda: all(replica.up and not replica.outstanding for replica in fan_out.pool.everyone()))
