"""The random requests of tests/serving/test_congruence.py through TorchServe's REST and gRPC: the same numbers and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.errors import InputError, NotFoundError
from recinfer.inference.predictor import LookupResult, Predictor, load
from recinfer.serving.client.client import Embeddings
from recinfer.serving.client.torchserve import TorchServeClient
from recinfer.serving.wire import codec
from tests.serving.requests import BAD, TOLERANCE, Asked, kjt_of, nth_request
from tests.torchserve.instance import TorchServe

pytestmark = pytest.mark.nightly

OCTETS = "application/octet-stream"


@pytest.fixture(scope="module")
def predictors(predictor: Predictor, others: dict[str, Path]) -> dict[str, Predictor]:
    return {"tiny": predictor, **{name: load(path) for name, path in others.items()}}


@pytest.fixture(scope="module")
def clients(torchserve: TorchServe, predictors: dict[str, Predictor]) -> Iterator[dict[str, TorchServeClient]]:
    made = {
        name: TorchServeClient(torchserve.grpc_target, name, token=torchserve.inference_key, timeout=60)
        for name in predictors
    }
    yield made
    for client in made.values():
        client.close()


def same_embeddings(got: Embeddings, expected: LookupResult) -> None:
    assert got.keys() == expected.keys()
    if expected.pooled is not None:
        torch.testing.assert_close(got.pooled.values(), expected.pooled.values(), **TOLERANCE)
    for name, sequence in expected.sequences.items():
        assert got.sequences[name].lengths().tolist() == sequence.lengths().tolist()
        torch.testing.assert_close(got.sequences[name].values(), sequence.values(), **TOLERANCE)


def check(torchserve: TorchServe, client: TorchServeClient, predictor: Predictor, asked: Asked) -> None:
    if asked.dense is None:
        expected = predictor.lookup(asked.features)
        body = codec.encode_lookup_request(asked.features)
        reply = torchserve.predict(asked.model, body, OCTETS, X_Recinfer_Method="lookup")
        same_embeddings(Embeddings(*codec.decode_lookup_response(reply.body)), expected)
        same_embeddings(client.lookup(asked.features), expected)
        return
    logits = predictor.predict(asked.dense, asked.features, asked.context)["output"]
    body = codec.encode_predict_request(asked.dense, asked.features, context=asked.context)
    reply = torchserve.predict(asked.model, body, OCTETS)
    torch.testing.assert_close(codec.decode_predict_response(reply.body)[0]["output"], logits, **TOLERANCE)
    over_grpc = client.predict(asked.dense, asked.features, context=asked.context)
    torch.testing.assert_close(over_grpc["output"], logits, **TOLERANCE)


def test_random_requests(
    torchserve: TorchServe,
    clients: dict[str, TorchServeClient],
    predictors: dict[str, Predictor],
    request: pytest.FixtureRequest,
):
    def one(number: int) -> None:
        asked = nth_request(number)
        check(torchserve, clients[asked.model], predictors[asked.model], asked)

    with ThreadPoolExecutor(3) as pool:  # one worker a model answers, and there are three models
        list(pool.map(one, range(request.config.getoption("--congruence"))))


@pytest.mark.parametrize("case", list(BAD))
def test_errors_mean_the_same(
    torchserve: TorchServe, clients: dict[str, TorchServeClient], predictors: dict[str, Predictor], case: str
):
    kind, how = BAD[case]
    kjt = kjt_of(how["ids"])
    names: dict[str, Any] = {"model": how.get("model", "tiny"), "version": how.get("version", "")}
    if "dense" in how:
        body = codec.encode_predict_request(torch.tensor(how["dense"]), kjt, **names)
        reply = torchserve.predict("tiny", body, OCTETS)
    else:
        body = codec.encode_lookup_request(kjt, **names)
        reply = torchserve.predict("tiny", body, OCTETS, X_Recinfer_Method="lookup")
    assert reply.code == {InputError: 400, NotFoundError: 404}[kind]
    message = json.loads(reply.body)["message"]
    with pytest.raises(kind) as caught:
        clients["tiny"]._call("predict" if "dense" in how else "lookup", body)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)
    if kind is InputError and case not in ("nothing", "dense too wide"):
        with pytest.raises(kind) as inside:
            if "dense" in how:
                predictors["tiny"].predict(torch.tensor(how["dense"]), kjt)
            else:
                predictors["tiny"].lookup(kjt)
        assert message == str(inside.value)
