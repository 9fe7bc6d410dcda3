"""What gRPC takes of one connection: metadata up to one stated size, and pings as often as a client likes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.grpc_methods import MOST_METADATA_BYTES
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.messages import SERVICE_NAME as SHARD_SERVICE
from recinfer.serving.shards.tables import ShardTables
from tests.serving.conftest import make_request
from tests.serving.raw_http2 import RawHttp2, message
from tests.waiting import until


@contextmanager
def serving(kind: str, archive: Path, predictor: Predictor) -> Iterator[Server | ShardServer]:
    """A server, or a shard server."""
    if kind == "server":
        with Server({"tiny": predictor}) as server:
            yield server
    else:
        tables = ShardTables((0, 1))
        tables.add(archive)
        with ShardServer(tables) as shards:
            yield shards


@pytest.mark.parametrize("kind", ["server", "shard server"])
def test_metadata_below_the_limit_is_taken_and_a_byte_more_is_an_error(kind: str, archive: Path, predictor: Predictor):
    path = f"/{SERVICE_NAME}/GetModel" if kind == "server" else f"/{SHARD_SERVICE}/State"

    def refusal(size: int) -> str | None:
        """Of a call with so many bytes in one header; without a timeout, which would be a header of changing length."""
        try:
            call(b"", metadata=(("x-long", "a" * size),))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return str(error.details())
        return None

    with serving(kind, archive, predictor) as server, grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary(path)
        assert MOST_METADATA_BYTES == 32 << 10  # as docs/reference/rest.md says
        found = re.search(r"metadata size exceeds hard limit \((\d+) vs. 32768\)", refusal(32_700) or "")
        assert found is not None
        others = int(found[1]) - 32_700  # the other headers, as gRPC counts them
        most = MOST_METADATA_BYTES - 1 - others
        assert "metadata size exceeds" in (refusal(most + 1) or "")
        # Between the two limits of gRPC's defaults some calls are refused, so there are many.
        assert [refusal(size) for size in (9_000, 15_000, most) for _ in range(20)] == [None] * 60


def test_a_client_with_a_long_token_is_answered_or_gets_an_error_that_says_why(predictor: Predictor):
    features = make_request(0, 2)[1]
    with Server({"tiny": predictor}) as server:
        for size in (9_000, 15_000, 32_000):
            with InferenceClient(server.target, token="t" * size, timeout=60) as client:
                assert client.lookup(features).pooled.keys()
        with (
            InferenceClient(server.target, token="t" * 40_000, timeout=60) as client,
            pytest.raises(InputError, match="metadata size exceeds"),
        ):
            client.lookup(features)


@pytest.mark.parametrize("kind", ["server", "shard server"])
def test_pings_beside_an_open_watch_end_no_connection(kind: str, archive: Path, predictor: Predictor):
    """gRPC's own server takes two pings between which no data went, and sends the client away at the third."""
    with serving(kind, archive, predictor) as server, RawHttp2(server.port) as connection:
        watch = connection.call(
            "/grpc.health.v1.Health/Watch", message(health_pb2.HealthCheckRequest().SerializeToString()), end=True
        )

        def heard() -> int:
            connection.read(0.1)
            return connection.received.get(watch, 0)

        until(heard)
        before = heard()
        for _ in range(40):
            connection.settle()
        assert connection.sent_away is None and connection.ended == []
        other = connection.call("/grpc.health.v1.Health/Check", message(b""), end=True)
        connection.until_ended(1)
        assert connection.ended == [other] and connection.received[other] > 0
        server.stop()
        until(lambda: heard() > before)
