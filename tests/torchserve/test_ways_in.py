"""The rows of tests/serving/test_ways_in.py that need a real TorchServe: its gRPC, and its REST with protobuf and JSON."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import InputError
from recinfer.inference.predictor import load
from recinfer.serving.client.torchserve import TorchServeClient
from recinfer.serving.mar import pack
from tests.serving.tasks import tasks_archive
from tests.serving.test_ways_in import assert_the_same, requests
from tests.serving.ways_in import Asked, Way, flat, in_process, json_of, read_json, read_protobuf, to_protobuf
from tests.torchserve.instance import TorchServe

__all__ = ["tasks_archive"]

pytestmark = pytest.mark.slow


def rest(torchserve: TorchServe, *, is_json: bool) -> Way:
    def way(asked: Asked) -> Any:
        body = json.dumps(json_of(asked)).encode() if is_json else to_protobuf(asked)
        kind = "application/json" if is_json else "application/octet-stream"
        method = "lookup" if asked.dense is None else "predict"
        reply = torchserve.predict(asked.model, body, kind, X_Recinfer_Method=method)
        if reply.code != 200:
            assert reply.code == 400, reply
            raise InputError(json.loads(reply.body)["message"])
        return read_json(reply.body) if is_json else read_protobuf(reply.body, asked)

    return way


def test_torchserve_gives_the_same(
    torchserve: TorchServe,
    archive: Path,
    others: dict[str, Path],
    tasks_archive: Path,
    capsys: pytest.CaptureFixture[str],
):
    reply = torchserve.register(pack(tasks_archive, torchserve.model_store, model_name="tasks").name)
    assert reply.code == 200, reply
    models = {name: load(path) for name, path in {"tiny": archive, "tasks": tasks_archive, **others}.items()}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                TorchServeClient(torchserve.grpc_target, name, token=torchserve.inference_key, timeout=60)
            )
            for name in models
        }

        def over_grpc(asked: Asked) -> Any:
            client = clients[asked.model]
            if asked.dense is None:
                return flat(client.lookup(asked.features))
            return client.predict(asked.dense, asked.features)

        ways = {
            "Python in process": in_process(models),
            "TorchServe, gRPC": over_grpc,
            "TorchServe, REST, protobuf": rest(torchserve, is_json=False),
            "TorchServe, REST, JSON": rest(torchserve, is_json=True),
        }
        assert_the_same(ways, requests(), capsys)
