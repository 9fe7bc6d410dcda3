"""Several versions of a model through the Open Inference Protocol: one version checks and answers a request."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from recinfer.errors import NotFoundError
from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.open_inference import InferRequest, InputTensor
from recinfer.serving.server.open_inference_grpc import OpenInference
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.wire.proto.inference_pb2 import LookupRequest
from tests.serving.conftest import NUM_DENSE, ROWS
from tests.serving.paths import decoded
from tests.serving.test_open_inference import Admission, InferenceServerException, triton_grpc, triton_http
from tests.serving.test_sequences import predictors

__all__ = ["predictors"]


def side_by_side(predictor: Predictor, other: Predictor) -> ModelRegistry:
    """Two versions of one model, that give different outputs to as many of the requests each."""
    registry = ModelRegistry([ServedModel.of("two", predictor, "1"), ServedModel.of("two", other, "2")])
    registry.set_weights("two", {"1": 1, "2": 1})
    return registry


def test_a_request_is_checked_and_answered_by_one_version(predictor: Predictor, predictors: dict[str, Predictor]):
    arrays = {name: np.array([1]) for name in ROWS} | {"dense": np.ones((1, NUM_DENSE), np.float32)}
    with Server(side_by_side(predictor, predictors["sequences"]), http_port=0) as server:
        for library, target in ((triton_grpc, server.target), (triton_http, f"127.0.0.1:{server.http_port}")):
            door, versions, words = Admission(library, target), Counter(), Counter()
            for _ in range(100):
                try:
                    answer = door.infer(arrays, outputs=["output"], model="two").get_response()
                    versions[answer["model_version"] if library is triton_http else answer.model_version] += 1
                except InferenceServerException as error:
                    words[error.message()[:24]] += 1
            door.close()
            assert set(versions) == {"1"} and 20 < versions["1"] < 80
            assert set(words) == {"outputs: got 'output', e"}, words


def test_a_version_that_goes_before_it_answers_is_drawn_again(predictor: Predictor, predictors: dict[str, Predictor]):
    registry = side_by_side(predictor, predictors["sequences"])
    registry.set_weights("two", {"1": 1})
    registry.add(ServedModel.of("two", predictor, "3"))
    service, asked = InferenceService(registry), []

    async def ask(call: str, data: bytes) -> bytes:
        asked.append(LookupRequest.FromString(data).version)
        if len(asked) == 1:
            registry.set_weights("two", {"3": 1})
            registry.remove("two", "1")
        return decoded(service, "Lookup", data)

    door = OpenInference(registry, Limits(), ask)
    inputs = [InputTensor("user", "INT64", (1,), np.array([1]))]
    for version in ("", "3"):
        request = InferRequest("two", version, "", inputs, method="lookup")
        assert run_on_loop(door.infer(request, door.choose("two", version)), timeout=60).version == "3"
    assert asked == ["1", "3", "3"]
    with pytest.raises(NotFoundError, match="'1'"):
        door.choose("two", "1")
