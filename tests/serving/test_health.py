"""Health before a server has started, while it serves, and when a rank is lost."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recinfer.inference.predictor import Predictor, load
from recinfer.serving.server import grpc_core
from recinfer.serving.server.health import LIVENESS, READINESS
from recinfer.serving.server.http_server import HttpServer
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.shards.messages import SERVICE_NAME as SHARD_SERVICE
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire.proto import open_inference_pb2
from tests.ports import free_port
from tests.serving.remote.fleet import allowing_default_rows, asking, shard, write_shards
from tests.waiting import until

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
TOKEN = "a-token-of-24-characters"


def check(target: str, *services: str) -> list[int]:
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status for name in services]


def get(port: int | None, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def checked_early(monkeypatch: pytest.MonkeyPatch, target: str, services: tuple[str, ...]) -> list[list[int]]:
    """Gets what health at ``target`` says while the server there opens its metrics port: its gRPC port is open by then."""
    found: list[list[int]] = []
    start = HttpServer.start

    async def check_and_start(self: HttpServer) -> None:
        found.append(await asyncio.to_thread(check, target, *services))
        await start(self)

    monkeypatch.setattr(HttpServer, "start", check_and_start)
    return found


def test_a_server_that_starts_is_not_serving_yet(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    services = ("", SERVICE_NAME, "tiny", READINESS, LIVENESS)
    port = free_port()
    early = checked_early(monkeypatch, f"127.0.0.1:{port}", services)
    with Server({"tiny": predictor}, port=port, metrics_port=0) as server:
        assert early == [[NOT_SERVING] * 4 + [SERVING]]
        assert check(server.target, *services) == [SERVING] * 5


def test_a_shard_server_that_starts_is_not_serving_yet(archive: Path, monkeypatch: pytest.MonkeyPatch):
    services = ("", SHARD_SERVICE, READINESS, LIVENESS)
    port = free_port()
    early = checked_early(monkeypatch, f"127.0.0.1:{port}", services)
    tables = ShardTables((0, 1))
    tables.add(archive)
    with ShardServer(tables, port=port, metrics_port=0) as server:
        assert early == [[NOT_SERVING] * 3 + [SERVING]]
        assert check(server.target, *services) == [SERVING] * 4
        assert get(server.metrics_port, "/ready") == (200, {"ready": True})


def test_a_ranker_that_waits_for_its_shards_is_live_and_not_ready(predictor: Predictor):
    security = Security(token=TOKEN)
    with Server({"tiny": predictor}, http_port=0, metrics_port=0, security=security, serving=False) as server:
        assert check(server.target, "", READINESS, LIVENESS) == [NOT_SERVING, NOT_SERVING, SERVING]
        for port in (server.http_port, server.metrics_port):  # without the token, as gRPC's health
            assert get(port, "/ready") == (503, {"ready": False})
            assert get(port, "/live") == (200, {"live": True})
        server.set_serving(True)
        assert check(server.target, "", READINESS) == [SERVING, SERVING]
        for port in (server.http_port, server.metrics_port):
            assert get(port, "/ready") == (200, {"ready": True})


@pytest.mark.parametrize("default_rows", [False, True], ids=["error", "default rows"])
def test_readiness_follows_the_ranks(archive: Path, tmp_path: Path, default_rows: bool):
    if default_rows:
        archive = allowing_default_rows(archive, tmp_path / "allowing.rqa")
    with ExitStack() as stack:
        shards = [stack.enter_context(shard(archive, (rank,), f"127.0.0.{rank + 1}")) for rank in range(2)]
        path = write_shards(tmp_path / "shards.json", {rank: [shards[rank].target] for rank in range(2)})
        fan_out = stack.enter_context(asking(path))
        predictor = load(archive, lookups=MakeLookups(fan_out))
        server = stack.enter_context(Server({"tiny": predictor}, shards=fan_out, http_port=0, metrics_port=0))
        channel = stack.enter_context(grpc.insecure_channel(server.target))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=60)
        stack.callback(watch.cancel)
        assert next(watch).status == SERVING

        shards[1].stop(0.0)
        until(lambda: not fan_out.pool.replicas(1)[0].up)
        code = 200 if default_rows else 503
        now = SERVING if default_rows else NOT_SERVING
        assert check(server.target, "", READINESS, LIVENESS) == [SERVING, now, SERVING]
        if not default_rows:
            assert next(watch).status == NOT_SERVING
        for port, paths in ((server.http_port, ("/ready", "/v2/health/ready")), (server.metrics_port, ("/ready",))):
            assert [get(port, name)[0] for name in paths] == [code] * len(paths)
        assert get(server.http_port, "/v2/health/live") == (200, {"live": True})
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=60)
        assert open_inference_pb2.ServerReadyResponse.FromString(ready).ready == default_rows


def test_open_watches_are_bounded_and_the_next_one_is_refused(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc_core, "_MOST_STREAMS", 2)
    with Server({"tiny": predictor}) as server, grpc.insecure_channel(server.target) as channel:
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        open_ones = [stub.Watch(request, timeout=60) for _ in range(2)]
        assert [next(watch).status for watch in open_ones] == [SERVING, SERVING]
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Watch(request, timeout=60))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details().startswith("2 Watch calls are open")
        assert stub.Check(request, timeout=60).status == SERVING

        open_ones[0].cancel()
        assert server._health is not None
        until(lambda: len(server._health._watching) < 2)
        again = stub.Watch(request, timeout=60)
        assert next(again).status == SERVING
        for watch in (open_ones[1], again):
            watch.cancel()
