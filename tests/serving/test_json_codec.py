"""JSON bodies mean the same as the protobuf messages; errors name what is malformed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from recinfer.errors import InputError
from recinfer.serving.wire import codec, json_codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedTensor

BODY = {"dense": [[1, 2.5], [3, 4]], "features": {"a": [[7], [8, 9]], "b": [3, []]}}


def test_predict_request():
    request = pb.PredictRequest.FromString(json_codec.predict_request({**BODY, "model": "m", "version": "v"}))
    assert (request.model, request.version) == ("m", "v")
    kjt = codec.decode_bags(request.features, Limits()).kjt()
    assert kjt.keys() == ["a", "b"]
    assert kjt.lengths().tolist() == [1, 2, 1, 0]
    assert kjt.values().tolist() == [7, 8, 9, 3]
    assert codec.decode_dense(request.dense, 2, 2).tolist() == [[1, 2.5], [3, 4]]


def test_weights_follow_the_ids():
    body = {"features": {"a": [[7], [8, 9]]}, "weights": {"a": [[1], [0.5, 2]]}}
    request = pb.LookupRequest.FromString(json_codec.lookup_request(body))
    assert codec.decode_bags(request.features, Limits()).kjt().weights().tolist() == [1, 0.5, 2]


def test_weights_of_a_context_and_of_inputs():
    body = {
        "features": {"a": [[7], [8, 9]]},
        "context": {"user": [[3, 4]], "city": [["paris"]], "prices": [[0.5]]},
        "inputs": {"times": [[1, 2], [3, 4]], "gaps": [[0.5], []]},
        "weights": {
            "user": [[0.25, 4]],
            "city": [[3]],
            "prices": [[2]],
            "times": [[1, 2], [0.5, 3]],
            "gaps": [[8], []],
        },
    }
    request = pb.PredictRequest.FromString(json_codec.predict_request(body))
    assert codec.decode_bags(request.features, Limits()).kjt().weights_or_none() is None
    assert list(request.context.keys) == ["user", "city"]
    assert np.frombuffer(request.context.weights, np.float32).tolist() == [0.25, 4, 3]
    given = {one.name: one for one in (*request.inputs, *request.context_inputs)}
    read = {name: np.frombuffer(one.weights, np.float32).tolist() for name, one in given.items()}
    assert read == {"times": [1, 2, 0.5, 3], "gaps": [8], "prices": [2]}
    assert np.frombuffer(given["times"].lengths, np.int32).tolist() == [2, 2]


def test_no_ids_at_all():
    request = pb.LookupRequest.FromString(json_codec.lookup_request({"features": {"a": [[], []]}}))
    assert codec.decode_bags(request.features, Limits()).kjt().lengths().tolist() == [0, 0]


def test_what_is_not_finite_is_null():
    outputs = torch.tensor([[1.5, float("nan")], [float("inf"), -float("inf")]])
    text = json_codec.json_text({"outputs": {"score": outputs.tolist()}, "n": [1, "NaN", True, None]})
    assert json.loads(text) == {"outputs": {"score": [[1.5, None], [None, None]]}, "n": [1, "NaN", True, None]}
    assert json_codec.json_text({"a": [0.1]}) == '{"a": [0.1]}'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": None}, ["features", "NoneType", "object"]),
        ({"features": {}}, ["features", "none", "at least one"]),
        ({"features": {"a": 3}}, ["features['a']", "int", "list"]),
        ({"features": {"a": [[1]], "b": [1, 2]}}, ["features['b']", "2 samples", "expected 1"]),
        ({"features": {"a": [[1.5], [2]]}}, ["features['a']", "integer ids"]),
        ({"features": {"a": [["x"], [2]]}}, ["features['a']", "integer ids"]),
        ({"features": {"a": [[None], [2]]}}, ["features['a']", "integer ids"]),
        ({"features": {"a": [[[1]], [2]]}}, ["integer"]),
        ({"features": {"a": [[True], [3]]}}, ["features['a']", "integer ids"]),
        ({"dense": [[1, True], [3, 4]]}, ["dense[0][1]", "true", "number"]),
        ({"features": {"a": [[2**70], [2]]}}, ["features['a']", "64 bits"]),
        ({"features": {"\ud800": [1, 2]}}, ["features", "surrogate"]),
        ({"weights": {"c": [[1], [2, 3]]}}, ["weights", "'c'", "features"]),
        ({"weights": {"a": [[1], [2]], "b": [3, []]}}, ["weights['a']", "one weight per id"]),
        ({"weights": {"a": [["x"], [2, 3]], "b": [3, []]}}, ["weights", "numbers"]),
        ({"inputs": {"t": [[1], [2]]}, "weights": {"t": [[1], [2, 3]]}}, ["weights['t']", "one weight for each value"]),
        ({"inputs": {"t": [[1], [2]]}, "weights": {"t": [["x"], [2]]}}, ["'t'", "numbers"]),
        ({"context": {"u": [[1, 2]]}, "weights": {"u": [[1]]}}, ["weights['u']", "one weight for each value"]),
        ({"dense": [[1, 2]]}, ["dense", "[1, 2]", "2 (the batch size)"]),
        ({"dense": [[1, 2], [3]]}, ["dense", "numbers"]),
        ({"dense": [["x", 2], [3, 4]]}, ["dense", "numbers"]),
        ({"dense": {"a": 1}}, ["dense", "numbers"]),
        ({"model": 3}, ["model", "int", "string"]),
        ({"colour": 3}, ["colour", "features"]),
    ],
)
def test_refuses_by_name(change: dict[str, object], words: list[str]):
    with pytest.raises(InputError) as caught:
        json_codec.predict_request({**BODY, **change})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", b"\xff", "[" * 100_000])
def test_text_that_is_no_object(text: str | bytes):
    with pytest.raises(InputError, match="body: got"):
        json_codec.parse_json(text)


def test_what_is_beyond_float32_becomes_infinite_for_the_predictor_to_refuse():
    request = pb.PredictRequest.FromString(json_codec.predict_request({**BODY, "dense": [[1e300, 2], [3, 4]]}))
    assert codec.decode_dense(request.dense, 2, 2).tolist() == [[float("inf"), 2], [3, 4]]


def test_responses():
    data = codec.encode_predict_response({"logits": torch.tensor([[0.5], [1.0]])}, "v")
    assert json_codec.predict_response(data) == {"outputs": {"logits": [[0.5], [1.0]]}, "model_version": "v"}
    pooled = KeyedTensor(["a"], [2], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    sequence = JaggedTensor(torch.tensor([[1.0], [2.0]]), lengths=torch.tensor([2, 0]))
    data = codec.encode_lookup_response(pooled, {"s": sequence}, 2, "v")
    assert json_codec.lookup_response(data) == {
        "embeddings": {"a": [[1.0, 2.0], [3.0, 4.0]]},
        "sequences": {"s": [[[1.0], [2.0]], []]},
        "model_version": "v",
    }
