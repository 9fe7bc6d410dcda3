"""The handler in this process: a batch of requests shares one lookup and one dense run, and each has its own answer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor
from recinfer.serving.wire import codec
from tests.conftest import ROOT
from tests.serving.conftest import make_request
from tests.torchserve.conftest import needs

TOLERANCE = {"rtol": 0, "atol": 1e-6}


class Context:
    """The part of TorchServe's context that recinfer's handler uses."""

    def __init__(self, archive: Path, headers: list[dict[str, str]]) -> None:
        self.model_yaml_config = {"handler": {"archive": str(archive)}}
        self.system_properties = {"batch_size": len(headers)}
        self.headers, self.statuses, self.types = headers, {}, {}

    def get_request_header(self, index: int, name: str) -> str | None:
        return self.headers[index].get(name)

    def set_response_content_type(self, index: int, kind: str) -> None:
        self.types[index] = kind

    def set_response_status(self, code: int, phrase: str, index: int) -> None:
        self.statuses[index] = (code, phrase)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Samples of every run of a predictor's dense part."""
    found: list[int] = []
    real = Predictor.run_engine_arrays

    def counted(self: Predictor, arrays: Any, **how: Any) -> Any:
        found.append(arrays[0].shape[0])
        return real(self, arrays, **how)

    monkeypatch.setattr(Predictor, "run_engine_arrays", counted)
    yield found


def handler(archive: Path, headers: list[dict[str, str]]) -> tuple[Any, Context]:
    needs("ts")
    spec = importlib.util.spec_from_file_location("recinfer_handler", ROOT / "handlers" / "recinfer_handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made, context = module.RecinferHandler(), Context(archive, headers)
    made.initialize(context)
    return made, context


def test_a_batch_shares_runs(archive: Path, predictor: Predictor, runs: list[int]):
    requests = [make_request(seed, 1 + seed) for seed in range(6)]
    wrong = codec.encode_predict_request(torch.zeros(2, 4), make_request(0, 2)[1])
    user = make_request(9, 1, keys=["user", "history"])[1]
    bags = {key: [bag.long().tolist() for bag in value.to_dense()] for key, value in requests[3][1].to_dict().items()}
    rows = [
        {"body": codec.encode_predict_request(*requests[0])},
        {"body": codec.encode_lookup_request(requests[1][1]), "method": b"lookup"},
        {"body": wrong},
        {"body": {"dense": requests[3][0].tolist(), "features": bags}},
        {"body": codec.encode_lookup_request(requests[4][1]), "method": b"lookup"},
        {"body": codec.encode_predict_request(*make_request(5, 3, keys=["item", "shop"]), context=user)},
    ]
    headers = [{"Content-Type": "application/json"} if index == 3 else {} for index in range(len(rows))]
    made, context = handler(archive, headers)
    runs.clear()  # those that the load made
    answers = made.handle(rows, context)
    assert runs == [1 + 4 + 3]
    for index in (0, 5):
        dense, kjt = requests[0] if index == 0 else make_request(5, 3, keys=["item", "shop"])
        expected = predictor.predict(dense, kjt, None if index == 0 else user)["output"]
        torch.testing.assert_close(codec.decode_predict_response(answers[index])[0]["output"], expected, **TOLERANCE)
    for index in (1, 4):
        expected = predictor.lookup(requests[index][1]).pooled.values()
        torch.testing.assert_close(codec.decode_lookup_response(answers[index])[0].values(), expected, **TOLERANCE)
    output = torch.tensor(json.loads(answers[3])["outputs"]["output"])
    torch.testing.assert_close(output, predictor.predict(*requests[3])["output"], **TOLERANCE)
    assert json.loads(answers[2])["error"]["code"] == "INVALID_ARGUMENT"
    assert context.statuses == {2: (400, "INVALID_ARGUMENT")}
    kinds = {index: "json" if index in (2, 3) else "octet-stream" for index in range(6)}
    assert context.types == {index: f"application/{kind}" for index, kind in kinds.items()}


def test_a_context_as_json(archive: Path, predictor: Predictor):
    dense, kjt = make_request(1, 2, keys=["item", "shop"])
    context = make_request(2, 1, keys=["user", "history"])[1]

    def bags(features: Any) -> dict[str, list[list[int]]]:
        return {key: [bag.long().tolist() for bag in value.to_dense()] for key, value in features.to_dict().items()}

    body = {"dense": dense.tolist(), "features": bags(kjt), "context": bags(context)}
    expected = predictor.predict(dense, kjt, context)["output"]
    for kind, sent in (("application/json", body), ("Application/JSON; charset=UTF-8", json.dumps(body).encode())):
        made, told = handler(archive, [{"Content-Type": kind}])
        (answer,) = made.handle([{"body": sent}], told)
        torch.testing.assert_close(torch.tensor(json.loads(answer)["outputs"]["output"]), expected, **TOLERANCE)


def test_a_feature_left_out_is_named_in_either_form(archive: Path, predictor: Predictor):
    dense, kjt = make_request(1, 2, keys=["item", "shop"])
    with pytest.raises(InputError, match="missing features: 'user', 'history'; got item, shop") as inside:
        predictor.predict(dense, kjt)
    bags = {key: [bag.long().tolist() for bag in value.to_dense()] for key, value in kjt.to_dict().items()}
    rows = [{"body": codec.encode_predict_request(dense, kjt)}, {"body": {"dense": dense.tolist(), "features": bags}}]
    made, context = handler(archive, [{}, {"Content-Type": "application/json"}])
    for answer in made.handle(rows, context):
        assert json.loads(answer)["error"] == {"code": "INVALID_ARGUMENT", "message": str(inside.value)}


def test_a_batch_may_be_longer_than_a_servers_queue(archive: Path, predictor: Predictor, runs: list[int]):
    """TorchServe has taken its requests already: none is refused for their number."""
    request = make_request(1, 1)
    made, context = handler(archive, [{}] * 600)
    answers = made.handle([{"body": codec.encode_predict_request(*request)}] * 600, context)
    expected = predictor.predict(*request)["output"]
    for answer in answers:
        torch.testing.assert_close(codec.decode_predict_response(answer)[0]["output"], expected, **TOLERANCE)
