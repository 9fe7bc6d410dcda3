"""Each error that a server raises arrives at every client as the same class, with its message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from recinfer import errors
from recinfer.errors import RecinferError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.engine.dispatcher import Dispatcher
from recinfer.serving.engine.request import Request
from recinfer.serving.server.server import Server
from tests.serving.conftest import make_request

KINDS = [kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), RecinferError)]
INTERNAL = {errors.ConfigError, errors.CheckpointError, errors.ArchiveError, errors.MismatchError, errors.RecinferError}


@pytest.fixture(scope="module")
def running(predictor: Predictor) -> Iterator[Server]:
    with Server({"tiny": predictor}, admin=True) as server:
        yield server


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_class(running: Server, monkeypatch: pytest.MonkeyPatch, kind: type[RecinferError]) -> None:
    def fail(dispatcher: Dispatcher, request: Request) -> None:
        request.reply(kind("why it is so"))

    monkeypatch.setattr(Dispatcher, "dispatch", fail)
    expected = errors.RecinferError if kind in INTERNAL else kind
    features = make_request(0, 2)[1]

    async def ask() -> None:
        async with AsyncInferenceClient(running.target, retries=0, timeout=60) as client:
            await client.lookup(features)

    def check(error: RecinferError) -> None:
        assert type(error) is expected
        assert ("why it is so" in str(error)) == (kind not in INTERNAL)

    with InferenceClient(running.target, retries=0, timeout=60) as client, pytest.raises(RecinferError) as blocking:
        client.lookup(features)
    check(blocking.value)
    with pytest.raises(RecinferError) as asynchronous:
        asyncio.run(ask())
    check(asynchronous.value)
