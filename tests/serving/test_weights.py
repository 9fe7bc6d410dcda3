"""Weights per feature: missing means 1 in every protocol; weights of an unweighted feature are an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recinfer.columns import as_features
from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor, load
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.server.server import Server
from recinfer.serving.wire import json_codec
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import make_archive
from tests.serving.paths import decoded
from tests.serving.test_open_inference import Admission, triton_grpc, triton_http


class MixedTwoTask(nn.Module):
    """One weighted collection, one that is not, and two outputs with names."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(30, 4, "tags", feature_names=["tags", "more"])], is_weighted=True
        )
        self.users = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 4, "users", feature_names=["user"])])
        self.click, self.buy = nn.Linear(12, 1), nn.Linear(12, 2)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        both = torch.cat([self.tags(features).values(), self.users(features).values()], 1)
        return {"click": self.click(both), "buy": self.buy(both)}


IDS: dict[str, Any] = {"tags": [[3, 7], [5]], "user": [4, 9], "more": [[], [1, 2]]}
TAG_WEIGHTS, USER_WEIGHTS = [[0.5, 2.0], [3.0]], [1.0, 1.0]
WEIGHTED = IDS | {"tags": (IDS["tags"], TAG_WEIGHTS)}
CASES = {"none": IDS, "of one feature": WEIGHTED}


def kjt() -> dict[str, KeyedJaggedTensor]:
    """The cases as KeyedJaggedTensors, whose weights are of all ids."""
    keys, values = ["tags", "user", "more"], torch.tensor([3, 7, 5, 4, 9, 1, 2])
    lengths = torch.tensor([2, 1, 1, 1, 0, 2])
    weights = torch.tensor([0.5, 2, 3, 1, 1, 1, 1])
    return {
        "none": KeyedJaggedTensor(keys, values, torch.ones(7), lengths=lengths),
        "of one feature": KeyedJaggedTensor(keys, values, weights, lengths=lengths),
    }


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("mixed")
    return load(make_archive(folder, model=MixedTwoTask(), precision=DataType.FP32, ranks=1)[1].root)


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    with Server({"mixed": predictor}, http_port=0) as running:
        yield running


def triton_inputs(features: dict[str, Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, column in features.items():
        one = as_features({name: column})
        found[f"{name}.values"], found[f"{name}.lengths"] = one.values, one.lengths
        if one.weights is not None:
            found[f"{name}.weights"] = one.weights
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_protocol_gives_the_same_outputs_by_name(server: Server, predictor: Predictor, case: str) -> None:
    expected = predictor.predict(None, kjt()[case])
    assert list(expected) == ["click", "buy"]

    def check(found: Any) -> None:
        assert list(found) == ["click", "buy"]
        for name in expected:
            assert torch.equal(torch.as_tensor(found[name]), expected[name])

    check(predictor.predict(None, CASES[case]))
    with InferenceClient(server.target, timeout=60) as client:
        check(client.predict(None, CASES[case]))
        check(client.predict(None, kjt()[case]))
        assert torch.equal(client.lookup(CASES[case])["tags"], predictor.lookup(kjt()[case])["tags"])
        assert torch.equal(client.lookup(CASES[case])["tags"], predictor.lookup(CASES[case])["tags"])
    for triton, target in ((triton_grpc, server.target), (triton_http, f"127.0.0.1:{server.http_port}")):
        door = Admission(triton, target)
        answer = door.infer(triton_inputs(CASES[case]), model="mixed")
        check({name: answer.as_numpy(name) for name in ("click", "buy")})
        door.close()
    # The JSON of the TorchServe handler, and its bytes, over the same service.
    body: dict[str, Any] = {"features": IDS} | ({} if case == "none" else {"weights": {"tags": TAG_WEIGHTS}})
    service = InferenceService(server.service.registry)
    check(json_codec.predict_response(decoded(service, "Predict", json_codec.predict_request(body)))["outputs"])


def test_a_feature_without_weights_says_so(server: Server, predictor: Predictor) -> None:
    wrong, words = (
        IDS | {"user": (IDS["user"], USER_WEIGHTS)},
        r"weights\['user'\]: this feature takes no weights.*more, tags",
    )
    with InferenceClient(server.target, timeout=60) as client:
        for ask in (client.lookup, predictor.lookup):
            with pytest.raises(InputError, match=words):
                ask(wrong)
        with pytest.raises(InputError, match=words):
            client.predict(None, wrong)
    door = Admission(triton_http, f"127.0.0.1:{server.http_port}")
    with pytest.raises(Exception, match=words):
        door.infer(triton_inputs(wrong), model="mixed")
    door.close()


def test_metadata_lists_the_weights_that_may_be_sent(server: Server) -> None:
    door = Admission(triton_http, f"127.0.0.1:{server.http_port}")
    names = [tensor["name"] for tensor in door.client.get_model_metadata("mixed")["inputs"]]
    door.close()
    assert "tags.weights" in names and "more.weights" in names and "user.weights" not in names
    with InferenceClient(server.target, timeout=60) as client:
        assert {f.name: f.weighted for f in client.get_model().features} == {"tags": True, "more": True, "user": False}


def test_weights_have_the_form_of_their_ids() -> None:
    for weights in ([[1.0], [1.0]], [[1.0, 2.0]], [1.0], [[1.0, 2.0, 3.0], []]):
        with pytest.raises(InputError, match=r"weights\['tags'\]: got a different structure"):
            as_features({"tags": ([[3, 7], [5]], weights)})
    for nested in ([[[1.0]]], [[[1.0, 2.0]]], [[[]]]):
        for others in ({}, {"more": ([[3]], [[1.0]])}):
            with pytest.raises(InputError, match=r"weights\['tags'\]: got a different structure"):
                as_features({"tags": ([[3]], nested), **others})
    with pytest.raises(InputError, match=r"weights\['tags'\]: got strings, expected numbers"):
        as_features({"tags": ([[3, 7]], [["a", "b"]])})
    found = as_features({"a": [1, 2], "tags": (np.array([[3, 7], [5, 6]]), np.ones((2, 2))), "b": ([[], [1]], None)})
    assert found.weighted == ("tags",) and found.weights is not None and found.weights.tolist() == [1.0] * 4


def test_a_frame_has_weights_in_a_second_column() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    found = as_features(pandas.DataFrame({"user": [4, 9], "tags": IDS["tags"], "tags.weights": TAG_WEIGHTS}))
    assert found.keys == ("user", "tags") and found.weighted == ("tags",)
    assert found.weights is not None and found.weights.tolist() == [0.5, 2.0, 3.0]


def test_rows_of_arrays_keep_their_weights() -> None:
    whole = as_features(WEIGHTED)
    last = whole.rows(1, 9)
    assert (last.batch, last.lengths.tolist(), last.values.tolist()) == (1, [1, 1, 2], [5, 9, 1, 2])
    assert last.weights is not None and last.weights.tolist() == [3.0]


def test_weighted_keys_that_are_no_keys_are_refused(server: Server) -> None:
    message = pb.LookupRequest(features=pb.JaggedFeatures(keys=["tags"], batch_size=1, weighted_keys=["x"]))
    message.features.lengths = np.int32([0]).tobytes()
    with pytest.raises(InputError, match=r"features.weighted_keys: got 'x', expected some of features.keys"):
        decoded(InferenceService(server.service.registry), "Lookup", message.SerializeToString())
