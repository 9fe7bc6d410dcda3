"""Answers of shards that are not what was asked for: each is a failed try, whatever connection it came over."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recinfer.errors import UnavailableError
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.server import ShardServer
from recinfer.serving.wire import codec
from tests.serving.remote.fleet import asking, shard, until, write_shards
from tests.serving.remote.test_direct import make_archive, make_request, service_of
from tests.serving.remote.test_quick import later, ranking, replicated

CONNECTIONS = ("socket", "stream", "call")
MALFORMED = {
    "no whole float": b"\x0a\x05\x01\x02\x03\x04\x05",
    "a field that ends too late": b"\x0a\x05\x01",
    "a failure that is none": b"\x1a\x05\x01\x02\x03\x04\x05",
    "nothing": b"",
}


def use(fan_out: FanOut, connection: str) -> None:
    """Have all replicas be asked over one kind of connection."""
    for replica in fan_out.pool.everyone():
        if connection == "call":
            replica.quick._again = math.inf
        elif connection == "stream":
            replica.quick.use_socket(None)


def is_used(fan_out: FanOut, connection: str) -> bool:
    """Whether requests go over it; the first ones go as calls while a connection opens."""
    return connection == "call" or all(
        any(way.is_open for way in replica.quick._ways) for replica in fan_out.pool.everyone()
    )


def answering(server: ShardServer, answer: bytes) -> None:
    """Have a shard answer every lookup with ``answer``."""
    server.tables.find = lambda data, limits: answer  # type: ignore[method-assign]


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_without_another_replica_the_request_is_unavailable_at_once(tmp_path: Path, connection: str, answer: bytes):
    archive = make_archive(tmp_path, "row_wise")
    with shard(archive, (0, 1, 2)) as server:
        path = write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})
        with asking(path) as fan_out, ranking(service_of(archive, fan_out)) as (_, client):
            use(fan_out, connection)
            until(lambda: client.lookup(make_request(4)) is not None and is_used(fan_out, connection))
            answering(server, answer)
            with pytest.raises(
                UnavailableError, match=f"rank 0 has no living replica: {server.target} .*its answer is malformed"
            ):
                client.lookup(make_request(4))
            assert all(replica.outstanding == 0 for replica in fan_out.pool.everyone())


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_another_replica_is_asked(tmp_path: Path, connection: str, monkeypatch: pytest.MonkeyPatch):
    archive = make_archive(tmp_path, "row_wise")
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.0)  # replicas are asked in turns
    with replicated(archive, tmp_path, hedge=False) as (service, fan_out, servers):
        use(fan_out, connection)
        data = codec.encode_lookup_request(make_request(4))
        expected, _ = later(service, "Lookup", data)
        until(lambda: later(service, "Lookup", data)[0] == expected and is_used(fan_out, connection))
        answering(servers[0], MALFORMED["no whole float"])
        while not fan_out.calls["failed"]:  # they take turns
            assert later(service, "Lookup", data)[0] == expected
        until(lambda: all(replica.outstanding == 0 for replica in fan_out.pool.everyone()))
