"""Finite inputs that overflow in a model: an error that names the sample, on every path, for that request only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.server.server import Server
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import export, make_request, steep_model
from tests.serving.paths import BytePath, decoded, together

HUGE = 1e18  # finite, and so is its square: the byte path does not leave it to the other for that


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> InferenceService:
    """Of a model whose dense layers multiply by much: their vector is infinite, and so are terms of both signs in its products."""
    path = export(steep_model(1e11), tmp_path_factory.mktemp("nan"), "steep", "1")
    return InferenceService(ModelRegistry({"steep": load(path)}))


@pytest.fixture(scope="module")
def client(service: InferenceService) -> Iterator[InferenceClient]:
    with Server(service.registry) as server, InferenceClient(server.target, timeout=60) as client:
        yield client


def odd_request(batch: int = 4) -> tuple[Tensor, KeyedJaggedTensor]:
    dense, features = make_request(1, batch)
    dense[2] = torch.tensor([HUGE, -HUGE, HUGE])
    return dense, features


SAYS = r"output 'output': sample 2 is NaN, though all inputs are finite"


def test_the_answer_is_an_error(client: InferenceClient):
    with pytest.raises(InputError, match=SAYS):
        client.predict(*odd_request())
    assert client.predict(*make_request(1, 4))["output"].isfinite().all()


def test_the_byte_path_leaves_it_to_the_decoded_path(service: InferenceService):
    data = codec.encode_predict_request(*odd_request())
    paths = BytePath(service)
    request = paths.read(data)
    assert request is not None and request.can_predict() and request.dense() is not None
    assert paths.predict(data) == [None]
    with pytest.raises(InputError, match=SAYS):
        decoded(service, "Predict", data)


def test_parts_that_run_side_by_side(service: InferenceService):
    paths = BytePath(service, threads=2)
    try:
        assert paths.predict(codec.encode_predict_request(*odd_request(256))) == [None]
        assert paths.predict(codec.encode_predict_request(*make_request(1, 256))) != [None]
    finally:
        paths.close()


def test_others_of_the_same_run_are_answered(service: InferenceService):
    messages = [codec.encode_predict_request(*make_request(seed, 4)) for seed in range(2)]
    messages.insert(1, codec.encode_predict_request(*odd_request()))
    answers = together(service, "Predict", messages)
    assert [isinstance(answer, bytes) for answer in answers] == [True, False, True]
    with pytest.raises(InputError, match=SAYS):
        raise answers[1]


def test_a_product_that_forward_leaves_out_may_overflow(tmp_path: Path):
    """The square of the dense vector is among the products of the dense part, and forward takes others of them."""
    model = steep_model(1.0).eval()
    dense, features = make_request(1, 4)
    dense *= 1e22
    with torch.no_grad():
        expected = model(dense, features)
    assert expected.isfinite().all()
    outputs = load(export(model, tmp_path, "plain", "1")).predict(dense, features)["output"]
    torch.testing.assert_close(outputs.flatten(), expected.flatten(), rtol=0.02, atol=0.0)
