"""Unpooled and weighted features over the wire, and two models in one server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor


@pytest.fixture(scope="module")
def predictors(others: dict[str, Path]) -> dict[str, Predictor]:
    """The archives without a dense part, in this process."""
    return {name: load(path) for name, path in others.items()}


@pytest.fixture(scope="module")
def server(predictors: dict[str, Predictor]) -> Iterator[Server]:
    with Server(predictors) as running:
        yield running


def test_unpooled_features(server: Server, predictors: dict[str, Predictor]):
    kjt = KeyedJaggedTensor(["page", "clicks"], torch.tensor([3, 3, 8, 19, 0]), lengths=torch.tensor([1, 2, 0, 2]))
    with InferenceClient(server.target, timeout=60) as client:
        got = client.lookup(kjt)
        assert not client.get_model().features[0].pooled
    expected = predictors["sequences"].lookup(kjt)
    assert got.pooled is None
    assert got.keys() == ["clicks", "page"] == list(expected.sequences)
    for key, sequence in expected.sequences.items():
        assert torch.equal(got[key].values(), sequence.values())
        assert got[key].lengths().tolist() == sequence.lengths().tolist()
    assert got["clicks"].lengths().tolist() == [0, 2]


def test_weights_count(server: Server, predictors: dict[str, Predictor]):
    ids, lengths = torch.tensor([3, 4, 5]), torch.tensor([2, 1])
    kjt = KeyedJaggedTensor(["tag"], ids, lengths=lengths, weights=torch.tensor([0.5, 2.0, -1.0]))
    with InferenceClient(server.target, model="weighted", timeout=60) as client:
        got = client.lookup(kjt)
        assert torch.equal(got["tag"], predictors["weighted"].lookup(kjt).pooled["tag"])
        ones = client.lookup(KeyedJaggedTensor(["tag"], ids, lengths=lengths, weights=torch.ones(3)))
        assert not torch.allclose(got["tag"], ones["tag"])
        assert torch.equal(client.lookup(KeyedJaggedTensor(["tag"], ids, lengths=lengths))["tag"], ones["tag"])
        with pytest.raises(InputError, match=r"feature 'tag', sample 0: weight 1 is nan"):
            client.lookup(KeyedJaggedTensor(["tag"], ids, lengths=lengths, weights=torch.tensor([1, float("nan"), 1])))


def test_a_model_without_a_dense_part_cannot_predict(server: Server):
    kjt = KeyedJaggedTensor(["page"], torch.tensor([3]), lengths=torch.tensor([1]))
    with InferenceClient(server.target, timeout=60) as client, pytest.raises(InputError, match="call lookup"):
        client.predict(torch.zeros(1, 0), kjt)
