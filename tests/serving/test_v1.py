"""The V1 protocol of TensorFlow Serving and KServe: the predictor's numbers, its errors, and a client as its documentation has it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import DIM, NUM_DENSE, ROWS, make_request
from tests.serving.tasks import COLUMNS, tasks_archive, tasks_predictor
from tests.serving.test_sequences import predictors
from tests.serving.v1 import ask, columns_of, get, rows_of

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")

__all__ = ["predictors", "tasks_archive", "tasks_predictor"]

ROW = {name: [1] for name in ROWS} | {"dense": [0.5, 1.0, -2.0]}


@pytest.fixture(scope="module")
def server(predictor: Predictor, predictors: dict[str, Predictor]) -> Iterator[Server]:
    """A server of three models with an HTTP port."""
    with Server({"tiny": predictor, **predictors}, http_port=0, limits=Limits(max_batch=64, max_ids=5000)) as running:
        yield running


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_rows_and_columns_give_the_predictors_numbers(server: Server, predictor: Predictor, batch: int):
    dense, kjt = make_request(batch, batch)
    expected = predictor.predict(dense, kjt)["output"].tolist()
    code, headers, answer = ask(server, "tiny:predict", {"instances": rows_of(kjt, dense)})
    assert (code, answer) == (200, {"predictions": expected}) and headers["Content-Type"].startswith("application/json")
    assert ask(server, "tiny:predict", {"inputs": columns_of(kjt, dense)})[2] == {"outputs": expected}


def test_a_client_as_tensorflow_servings_documentation_has_it(server: Server):
    """The examples of its REST API and of its ResNet client, with urllib instead of ``requests.post(url, data)``."""
    root = f"http://127.0.0.1:{server.http_port}/v1/models/tiny"
    with urllib.request.urlopen(root) as answer:
        (version,) = json.loads(answer.read())["model_version_status"]
    assert version == {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    with urllib.request.urlopen(root + "/metadata") as answer:
        described = json.loads(answer.read())
    assert described["model_spec"] == {"name": "tiny", "signature_name": "", "version": "3"}
    signature = described["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert signature["inputs"]["user"]["dtype"] == "DT_INT64"
    assert [d["size"] for d in signature["inputs"]["dense"]["tensor_shape"]["dim"]] == ["-1", str(NUM_DENSE)]
    assert [d["size"] for d in signature["outputs"]["output"]["tensor_shape"]["dim"]] == ["-1", "1"]

    data = json.dumps({"signature_name": "serving_default", "instances": [ROW, ROW]}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(root + ":predict", data=data, headers=headers)) as response:
        predictions = json.loads(response.read())["predictions"]
    assert len(predictions) == 2 and predictions[0] == predictions[1] and isinstance(predictions[0][0], float)
    assert get(server, "/v1/models/tiny")[2]["ready"] is True  # KServe's form, in addition to TensorFlow Serving's
    assert get(server, "/v1/models")[2] == {"models": ["tiny", "sequences", "weighted"]}


def test_a_lookup_gives_vectors_by_feature(server: Server, predictor: Predictor):
    _, kjt = make_request(3, 4, keys=["shop", "user"])
    expected = {name: predictor.lookup(kjt)[name].tolist() for name in ("shop", "user")}
    answer = ask(server, "tiny:lookup", {"inputs": columns_of(kjt)})[2]["outputs"]
    assert answer == expected and len(answer["shop"][0]) == DIM
    rows = ask(server, "tiny:lookup", {"instances": rows_of(kjt), "signature_name": "lookup"})[2]["predictions"]
    assert rows == [{name: expected[name][at] for name in answer} for at in range(4)]
    # What a prediction takes may be looked up as it is.
    assert ask(server, "tiny:lookup", {"instances": [ROW]})[2]["predictions"][0].keys() == set(ROWS)


def test_unpooled_features_and_weights(server: Server, predictors: dict[str, Predictor]):
    clicks = KeyedJaggedTensor(["clicks"], torch.tensor([1, 2, 0]), lengths=torch.tensor([2, 0, 1]))
    vectors = predictors["sequences"].lookup(clicks)["clicks"].values().tolist()
    answer = ask(server, "sequences:lookup", {"instances": [{"clicks": [1, 2]}, {"clicks": []}, {"clicks": 0}]})[2]
    assert [row["clicks"] for row in answer["predictions"]] == [vectors[:2], [], vectors[2:]]

    weights = torch.tensor([0.5, 2.0, -1.0])
    tag = KeyedJaggedTensor(["tag"], torch.tensor([1, 2, 0]), lengths=torch.tensor([2, 0, 1]), weights=weights)
    expected = predictors["weighted"].lookup(tag)["tag"].tolist()
    for body in (
        {"instances": rows_of(tag)},
        {"inputs": {"tag": [{"ids": [1, 2], "weights": [0.5, 2]}, [], {"ids": 0, "weights": -1}]}},
    ):
        found = ask(server, "weighted:lookup", body)[2]
        assert (found.get("outputs") or {"tag": [row["tag"] for row in found["predictions"]]}) == {"tag": expected}
    # A model of one input may leave out its name.
    assert ask(server, "weighted:lookup", {"inputs": columns_of(tag)["tag"]})[2]["outputs"] == {"tag": expected}
    assert ask(server, "weighted:lookup", {"instances": [row["tag"] for row in rows_of(tag)]})[2] == {
        "predictions": [{"tag": vector} for vector in expected]
    }


def test_one_id_may_stand_without_a_list(server: Server):
    whole = ask(server, "tiny:predict", {"instances": [ROW]})[2]
    bare = {name: cell[0] if name in ROWS else cell for name, cell in ROW.items()}
    assert ask(server, "tiny:predict", {"instances": [bare]})[2] == whole
    columns = {name: [cell] for name, cell in bare.items()}
    assert ask(server, "tiny:predict", {"inputs": columns})[2]["outputs"] == whole["predictions"]


def test_versions_and_labels(predictor: Predictor):
    registry = ModelRegistry([ServedModel.of("tiny", predictor, version) for version in ("1", "2")])
    with Server(registry, http_port=0) as server:
        body = {"instances": [ROW]}
        assert ask(server, "tiny/versions/2:predict", body)[0] == 200
        registry.set_labels("tiny", {"stable": "1"})
        assert ask(server, "tiny/labels/stable:predict", body)[0] == 200
        code, _, answer = ask(server, "tiny/labels/canary:predict", body)
        assert (code, answer["error"]) == (404, "label: got 'canary' of model 'tiny', expected one of 'stable'")
        registry.set_labels("tiny", {"stable": "1", "canary": "2"})
        assert get(server, "/v1/models/tiny/labels/canary")[2]["model_version_status"][0]["version"] == "2"
        assert get(server, "/v1/models/tiny/labels/stable/metadata")[2]["model_spec"]["version"] == "1"
        assert [one["version"] for one in get(server, "/v1/models/tiny")[2]["model_version_status"]] == ["1", "2"]
        for path in ("/v1/models/tiny/versions/9", "/v1/models/other", "/v1/models/other/labels/stable"):
            assert get(server, path)[0] == 404
        assert ask(server, "tiny/versions/9:predict", body)[0] == ask(server, "other:lookup", body)[0] == 404


def row(**changed: Any) -> dict[str, Any]:
    """A body of two rows, of which the second has ``changed``; Ellipsis: without it."""
    cells = {**ROW, **changed}
    return {"instances": [ROW, {name: cell for name, cell in cells.items() if cell is not ...}]}


BAD: dict[str, tuple[Any, str]] = {
    "no json": (b"{", "body: got text that is not JSON"),
    "nothing": (b"", "body: got text that is not JSON"),
    "not utf-8": (b'{"instances": "\xff"}', "body: got text that is not JSON"),
    "a list": ([], "body: got a list of 0, expected a JSON object"),
    "deep lists": (b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "neither": ({}, "neither instances nor inputs"),
    "both": ({"instances": [ROW], "inputs": {}}, "both instances and inputs"),
    "unknown key": ({"instances": [ROW], "model": 1}, "body: got 'model'"),
    "signature": ({"instances": [ROW], "signature_name": "other"}, "signature_name: got 'other'"),
    "signature no text": ({"instances": [ROW], "signature_name": 3}, "signature_name: got 3"),
    "no rows": ({"instances": []}, "instances: got 0 samples, expected 1 to 64"),
    "too many rows": ({"instances": [ROW] * 65}, "instances: got 65 samples, expected 1 to 64"),
    "rows no list": ({"instances": ROW}, "instances: got an object"),
    "row no object": ({"instances": [ROW, 3]}, "instances[1]: got 3"),
    "columns no object": ({"inputs": [1]}, "inputs: got a list of 1"),
    "key twice": (
        b'{"instances": [{"user": [1], "user": [2]}]}',
        "body: got the key 'user' more than once in one object, expected each once",
    ),
    "missing in all": ({"instances": [{"user": [1], "dense": [0, 0, 0]}]}, "missing features: 'item'"),
    "missing in one": (row(user=...), "instances[1]: got no 'user'"),
    "unknown feature": ({"instances": [{**ROW, "nobody": [1]}]}, "instances[0]: got 'nobody'"),
    "unknown in one": (row(nobody=[1]), "instances[1]: got 'nobody'"),
    "no dense": ({"instances": [{"user": 1}]}, "instances[0]: got no 'dense', expected a list of 3 numbers"),
    "dense length": (row(dense=[1, 2]), "instances[1]['dense']: got a list of 2, expected a list of 3 numbers"),
    "dense type": (row(dense=[1, "2", 3]), "instances[1]['dense'][1]: got '2', expected a finite number"),
    "dense nan": (row(dense=[1, float("nan"), 3]), "dense: sample 1, column 1 is nan"),
    "dense infinity": (row(dense=[1, float("inf"), 3]), "dense: sample 1, column 1 is inf"),
    "dense 1e999": (
        json.dumps(row(dense=[1, 7, 3])).replace("7,", "1e999,").encode(),
        "dense: sample 1, column 1 is inf",
    ),
    "dense true": (row(dense=[1, True, 3]), "instances[1]['dense'][1]: got true"),
    "dense huge": (row(dense=[1, 10**400, 3]), "instances[1]['dense'][1]: got a number of more than 24 digits"),
    "dense null": (row(dense=None), "instances[1]['dense']: got null"),
    "id float": (row(user=[1.0]), "instances[1]['user']: got 1.0, expected ids, which are whole numbers"),
    "id true": (row(user=[True]), "instances[1]['user']: got true"),
    "id text": (row(user="17"), "instances[1]['user']: got '17'"),
    "id null": (row(user=None), "instances[1]['user']: got null"),
    "too many ids": (row(user=[1] * 5000), "instances: got 5007 ids in all, expected at most 5000"),
    "id nested": (row(user=[[1]]), "instances[1]['user']: got a list of 1"),
    "id nan": (row(user=[float("nan")]), "instances[1]['user']: got nan"),
    "id huge": (row(user=[2**63]), "instances[1]['user']: got 9223372036854775808, expected an id of 64 bits"),
    "id out of range": (row(user=[50]), "'user'"),
    "id negative": (row(user=[-1]), "'user'"),
    "digits": (b'{"instances": [{"user": ' + b"7" * 100_000 + b"}]}", "not JSON"),
    "object": (row(user={"id": [1]}), "instances[1]['user']: got an object, expected one with ids"),
    "weights length": (row(user={"ids": [1], "weights": []}), "instances[1]['user']: got 0 weights, expected 1"),
    "weights nan": (row(user={"ids": [1], "weights": [float("nan")]}), "instances[1]['user']: got weight nan"),
    "weights text": (row(user={"ids": [1], "weights": ["a"]}), "instances[1]['user']: got weight 'a'"),
    "column no list": ({"inputs": {"user": 1, "dense": [[1, 2, 3]]}}, "inputs['user']: got 1, expected a list"),
    "column length": (
        {"inputs": {**{name: [1, 2] for name in ROWS}, "dense": [[1, 2, 3]]}},
        "inputs['dense']: got 1 samples, expected 2",
    ),
    "column weights": (
        {"inputs": {"user": {"ids": [1], "weights": 1}, "dense": [[1, 2, 3]]}},
        "inputs['user']: got ids",
    ),
    "surrogate": (b'{"instances": [{"\\ud800": 1}]}', "instances[0]: got '\\ud800'"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_errors_name_the_place_in_the_body(server: Server, case: str):
    body, said = BAD[case]
    code, _, answer = ask(server, "tiny:predict", body)
    assert code == 400 and answer.keys() == {"error"} and said in answer["error"], answer
    assert len(answer["error"]) < 1100


def test_numbers_of_64_megabytes_are_refused(predictor: Predictor):
    with Server(
        {"tiny": predictor}, http_port=0, limits=Limits(max_message_bytes=65 << 20, memory_budget_bytes=2 << 30)
    ) as server:
        for number in (b"7" * (64 << 20), b"-0." + b"7" * (64 << 20)):
            code, _, answer = ask(server, "tiny:predict", b'{"instances": [{"user": ' + number + b"}]}")
            assert code == 400 and ("not JSON" in answer["error"] or "'dense'" in answer["error"]), answer
        assert server.budget.held == 0


def test_a_token_is_needed_and_may_be_a_browsers_password(predictor: Predictor):
    with Server({"tiny": predictor}, http_port=0, security=Security(token="0123456789abcdef")) as server:
        body = {"instances": [ROW]}
        code, headers, _ = ask(server, "tiny:predict", body)
        assert (code, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (
            get(server, "/v1/models/tiny")[0] == ask(server, "tiny:predict", body, Authorization="Bearer x")[0] == 401
        )
        assert ask(server, "tiny:predict", body, Authorization="Bearer 0123456789abcdef")[0] == 200
        assert ask(server, "tiny:predict", body, Authorization="Basic cmVjaW5mZXI6MDEyMzQ1Njc4OWFiY2RlZg==")[0] == 200


def test_other_paths_and_methods(server: Server):
    for path in ("tiny:predict", "tiny:lookup", "tiny/versions/3:predict", "tiny/labels/stable:predict"):
        code, headers, answer = get(server, f"/v1/models/{path}")
        assert (code, headers["Allow"]) == (405, "POST") and answer["error"].endswith("expected POST"), answer
    code, _, answer = ask(server, "tiny:classify", {})
    assert code in (404, 405) and "error" in answer
    assert "[:predict, :lookup or /metadata]" in get(server, "/v1/nothing")[2]["error"]


@pytest.fixture(scope="module")
def tasks(tasks_predictor: Predictor) -> Iterator[Server]:
    """A server of the model of two tasks, whose archive names its dense columns."""
    with Server({"tasks": tasks_predictor}, http_port=0) as running:
        yield running


TASKS_ROW = {"user": 3, "tags": {"ids": [1, 2], "weights": [0.5, 2.0]}, "price": 1.5, "age": -2}


def test_outputs_by_name_and_dense_columns_by_name(tasks: Server, tasks_predictor: Predictor):
    kjt = KeyedJaggedTensor(
        ["user", "tags"],
        torch.tensor([3, 3, 1, 2, 1, 2]),
        torch.tensor([1.0, 1.0, 0.5, 2.0, 0.5, 2.0]),
        torch.tensor([1, 1, 2, 2]),
    )
    found = tasks_predictor.predict(torch.tensor([[1.5, -2.0]] * 2), kjt)
    expected = {name: values.tolist() for name, values in found.items()}
    rows = [{name: values[at] for name, values in expected.items()} for at in range(2)]
    assert ask(tasks, "tasks:predict", {"instances": [TASKS_ROW] * 2})[2] == {"predictions": rows}
    columns = {name: [cell] * 2 for name, cell in TASKS_ROW.items()}
    assert ask(tasks, "tasks:predict", {"inputs": columns})[2] == {"outputs": expected}
    columns["price"] = [[1.5], [1.5]]  # as TensorFlow's shape [B, 1] has it
    assert ask(tasks, "tasks:predict", {"inputs": columns})[2] == {"outputs": expected}
    in_a_list = {name: cell for name, cell in TASKS_ROW.items() if name not in COLUMNS} | {"dense": [1.5, -2]}
    assert ask(tasks, "tasks:predict", {"instances": [in_a_list] * 2})[2] == {"predictions": rows}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"age": ...}, "instances[0]: got no 'age', expected all of the dense columns price, age"),
        ({"age": ..., "price": ...}, "expected a list of 2 numbers a sample, or the columns price, age"),
        ({"dense": [1, 2]}, "instances[0]: got 'dense' and 'price', expected one of them"),
        (
            {"prise": 1},
            "instances[0]: got 'prise', which is no input of this model; it takes user, tags, price, age, dense",
        ),
        ({"price": float("nan")}, "instances[0]['price']: got nan, expected a finite number"),
        ({"price": float("-inf")}, "instances[0]['price']: got -inf"),
        ({"price": 1e39}, "instances[0]['price']: got 1e+39"),
        ({"price": [1]}, "instances[0]['price']: got a list of 1"),
        ({"price": "1"}, "instances[0]['price']: got '1'"),
    ],
)
def test_a_dense_column_is_named_by_its_error(tasks: Server, changed: dict[str, Any], said: str):
    cells = {name: cell for name, cell in (TASKS_ROW | changed).items() if cell is not ...}
    code, _, answer = ask(tasks, "tasks:predict", {"instances": [cells]})
    assert code == 400 and said in answer["error"], answer


def test_large_finite_numbers_are_taken(tasks: Server):
    """Numbers within float32 whose squares are not."""
    assert ask(tasks, "tasks:predict", {"instances": [TASKS_ROW | {"price": 1e25}]})[0] == 200


def test_weights_are_of_weighted_features_alone(server: Server, tasks: Server):
    code, _, answer = ask(server, "tiny:lookup", {"instances": [{"user": {"ids": [1], "weights": [2]}}]})
    assert code == 400 and "'user'" in answer["error"], answer
    whole = ask(tasks, "tasks:predict", {"instances": [TASKS_ROW]})[2]
    ones = TASKS_ROW | {"user": {"ids": [3], "weights": [1.0]}}
    assert ask(tasks, "tasks:predict", {"instances": [ones]})[2] == whole
    bare = TASKS_ROW | {"tags": [1, 2]}
    ones = TASKS_ROW | {"tags": {"ids": [1, 2], "weights": [1, 1]}}
    assert (
        ask(tasks, "tasks:predict", {"instances": [bare]})[2] == ask(tasks, "tasks:predict", {"instances": [ones]})[2]
    )
