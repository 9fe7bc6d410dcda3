"""Bytes that are not a message and impossible file names are INVALID_ARGUMENT on every service."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.store import ModelStore
from recinfer.serving.server.server import Server
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.messages import decode_failure
from recinfer.serving.wire.proto import admin_pb2
from recinfer.serving.wire.proto import shards_pb2 as pb
from tests.serving.remote.fleet import shard
from tests.serving.remote.test_frames import Asker

NAMES = ["x" * 256, "\u00e9" * 200, "x" * 5000, "/".join(["x" * 200] * 30)]
IDS = ["long", "long in UTF-8", "longer than a path", "a long path"]


@pytest.fixture(scope="module")
def store(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    shutil.copytree(archive, folder / "tiny" / "3")
    return folder


@pytest.fixture(scope="module")
def admin(predictor: Predictor, store: Path) -> Iterator[Server]:
    with Server({"tiny": predictor}, admin=ModelStore(store)) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(archive: Path, store: Path) -> Iterator[ShardServer]:
    with shard(archive, (0, 1), store=store) as server:
        yield server


def refused(target: str, path: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """The status of a call with one request and one or many responses."""
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(path)(iter([data]), timeout=60))
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_bytes_that_are_no_message(server: Server, caplog: pytest.LogCaptureFixture, path: str):
    with caplog.at_level(logging.DEBUG):
        code, details = refused(server.target, path, b"\x0a\x05ab")
    assert (code, "4 bytes are not" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert "Traceback" not in caplog.text and "failed" not in caplog.text


@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_names_that_no_file_has_are_refused_by_a_shard(ranks: ShardServer, name: str):
    path = "/recinfer.v1.Shards/Prepare"
    blame = {grpc.StatusCode.INVALID_ARGUMENT}
    assert refused(ranks.target, path, pb.PrepareRequest(version="k", folder=name).SerializeToString())[0] in blame
    key = ranks.tables.keys()[0]
    delta = pb.PrepareRequest(version=f"{key}+1", folder="tiny/3", deltas=[name]).SerializeToString()
    assert refused(ranks.target, path, delta)[0] in blame


@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_names_that_no_file_has_are_refused_by_a_store(admin: Server, name: str):
    requests = {
        "Load": [admin_pb2.LoadRequest(model=name), admin_pb2.LoadRequest(model="tiny", version=name)],
        "ApplyDelta": [admin_pb2.ApplyDeltaRequest(model="tiny", version="3", delta=name)],
    }
    for call, messages in requests.items():
        for message in messages:
            code, details = refused(admin.target, f"/recinfer.v1.Admin/{call}", message.SerializeToString())
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), details


@pytest.mark.parametrize("field", ["ids", "ids_int64", "weights", "lengths"])
def test_a_shard_refuses_arrays_of_odd_length(ranks: ShardServer, field: str):
    part = pb.ShardPart(rank=0, module=0, length_bytes=4, lengths=b"\2\0\0\0" * 2, ids=bytes(16))
    if field == "ids_int64":
        part.ids = b""
    setattr(part, field, bytes(17))
    request = pb.ShardRequest(version=ranks.tables.keys()[0], batch_size=1, parts=[part])
    asker = Asker(ranks._listener).open()
    answer, code, details = asker.ask(request.SerializeToString())
    asker.close()
    failure = None if answer is None else decode_failure(answer)
    if failure is not None:
        code, details = failure
    assert (code, field.split("_")[0] in details) == ("INVALID_ARGUMENT", True), details
