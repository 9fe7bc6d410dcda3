"""The Open Inference Protocol through tritonclient, gRPC and HTTP: the predictor's numbers, and errors with a meaning."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from recinfer.errors import NotFoundError
from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.dispatcher import Dispatcher
from recinfer.serving.engine.request import Request
from recinfer.serving.server.open_inference_grpc import SERVICE_NAME
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import open_inference_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import DIM, NUM_DENSE, build_model, make_request
from tests.serving.test_sequences import predictors
from tests.waiting import until

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
triton_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed (the dev extra)")
triton_http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed (the dev extra)")
from tritonclient.utils import InferenceServerException  # noqa: E402

__all__ = ["predictors"]

TOLERANCE = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    """A server with both ports, whose limits are low enough to be reached."""
    limits = Limits(max_batch=64, max_ids=2000, max_message_bytes=1 << 20)
    with Server({"tiny": predictor}, limits=limits, http_port=0) as running:
        yield running


class Admission:
    """One of tritonclient's two clients, unchanged."""

    def __init__(self, library: ModuleType, target: str) -> None:
        self.library, self.client = library, library.InferenceServerClient(target)

    def tensor(self, name: str, array: np.ndarray) -> Any:
        datatype = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "float64": "FP64"}[array.dtype.name]
        tensor = self.library.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return tensor

    def infer(self, arrays: dict[str, np.ndarray], outputs: list[str] | None = None, **more: Any) -> Any:
        wanted = [self.library.InferRequestedOutput(name) for name in outputs] if outputs else None
        model = more.pop("model", "tiny")
        return self.client.infer(model, [self.tensor(*item) for item in arrays.items()], outputs=wanted, **more)

    def close(self) -> None:
        self.client.close()


@pytest.fixture(params=["grpc", "http"])
def door(request: pytest.FixtureRequest, server: Server) -> Iterator[Admission]:
    target = server.target if request.param == "grpc" else f"127.0.0.1:{server.http_port}"
    opened = Admission(triton_grpc if request.param == "grpc" else triton_http, target)
    yield opened
    opened.close()


def jagged(kjt: KeyedJaggedTensor) -> dict[str, np.ndarray]:
    arrays = {}
    for key, value in kjt.to_dict().items():
        arrays[f"{key}.values"] = value.values().numpy()
        arrays[f"{key}.lengths"] = value.lengths().numpy().astype(np.int32)
        if value.weights_or_none() is not None:
            arrays[f"{key}.weights"] = value.weights().numpy()
    return arrays


def test_server_and_model_are_described(door: Admission):
    assert door.client.is_server_live() and door.client.is_server_ready()
    assert door.client.is_model_ready("tiny") and door.client.is_model_ready("tiny", "3")
    assert not door.client.is_model_ready("other")
    described = [door.client.get_server_metadata(), door.client.get_model_metadata("tiny")]
    if door.library is triton_grpc:
        from google.protobuf.json_format import MessageToDict

        described = [MessageToDict(message) for message in described]
        for tensor in [*described[1]["inputs"], *described[1]["outputs"]]:
            tensor["shape"] = [int(size) for size in tensor["shape"]]
    assert described[0]["name"] == "recinfer"
    model = described[1]
    assert (model["name"], model["versions"], model["platform"]) == ("tiny", ["3"], "recinfer")
    inputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in model["inputs"]}
    assert inputs["dense"] == ("FP32", [-1, NUM_DENSE])
    assert inputs["history.values"] == ("INT64", [-1]) and inputs["history.lengths"] == ("INT32", [-1])
    outputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in model["outputs"]}
    assert outputs["user.embedding"] == ("FP32", [-1, DIM]) and outputs["output"] == ("FP32", [-1, 1])


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_predict_equals_the_predictor(door: Admission, predictor: Predictor, batch: int):
    dense, kjt = make_request(batch, batch)
    result = door.infer({"dense": dense.numpy(), **jagged(kjt)}, request_id="r7")
    expected = predictor.predict(dense, kjt)
    for name, tensor in expected.items():
        torch.testing.assert_close(torch.from_numpy(result.as_numpy(name).copy()), tensor, **TOLERANCE)
    answer = result.get_response()
    found = answer if isinstance(answer, dict) else {"id": answer.id, "model_version": answer.model_version}
    assert (found["id"], found["model_version"]) == ("r7", "3")


def test_named_embeddings_are_a_lookup_of_what_was_sent(door: Admission, predictor: Predictor):
    _, kjt = make_request(3, 4, keys=["shop", "user"])
    expected = predictor.lookup(kjt)
    some = door.infer(jagged(kjt), outputs=["shop.embedding"])
    np.testing.assert_allclose(some.as_numpy("shop.embedding"), expected["shop"].numpy(), atol=1e-6)
    assert some.as_numpy("user.embedding") is None
    everything = door.infer(jagged(kjt), parameters={"method": "lookup"})
    for key in ("shop", "user"):
        np.testing.assert_allclose(everything.as_numpy(f"{key}.embedding"), expected[key].numpy(), atol=1e-6)


def test_one_or_n_ids_a_sample_need_no_lengths(door: Admission, predictor: Predictor):
    user, history = np.array([3, 9, 1]), np.array([[1, 2], [3, 3], [0, 39]])
    kjt = KeyedJaggedTensor(
        ["user", "history"],
        torch.from_numpy(np.concatenate([user, history.reshape(-1)])),
        lengths=torch.tensor([1, 1, 1, 2, 2, 2]),
    )
    expected = predictor.lookup(kjt)
    for ids in (np.int64, np.int32):
        arrays = {"user": user.astype(ids), "history": history.astype(ids)}
        got = door.infer(arrays, outputs=["user.embedding", "history.embedding"])
        for key in ("user", "history"):
            np.testing.assert_allclose(got.as_numpy(f"{key}.embedding"), expected[key].numpy(), atol=1e-6)


def test_unpooled_and_weighted_features(predictors: dict[str, Predictor]):
    clicks = KeyedJaggedTensor(["clicks"], torch.tensor([1, 2, 0]), lengths=torch.tensor([2, 0, 1]))
    weights = torch.tensor([0.5, 2.0, -1.0])
    tag = KeyedJaggedTensor(["tag"], torch.tensor([1, 2, 0]), lengths=torch.tensor([2, 0, 1]), weights=weights)
    with Server(predictors, http_port=0) as server:
        for library, target in ((triton_grpc, server.target), (triton_http, f"127.0.0.1:{server.http_port}")):
            door = Admission(library, target)
            got = door.infer(jagged(clicks), model="sequences")  # no dense part: a lookup
            expected = predictors["sequences"].lookup(clicks)["clicks"]
            np.testing.assert_allclose(got.as_numpy("clicks.embedding"), expected.values().numpy(), atol=1e-6)
            assert got.as_numpy("clicks.embedding.lengths").tolist() == [2, 0, 1]
            got = door.infer(jagged(tag), model="weighted")
            expected = predictors["weighted"].lookup(tag)["tag"]
            np.testing.assert_allclose(got.as_numpy("tag.embedding"), expected.numpy(), atol=1e-6)
            arrays = {"tag": np.array([[1, 2], [0, 3]]), "tag.weights": np.ones((2, 2), np.float32)}
            assert door.infer(arrays, model="weighted").as_numpy("tag.embedding").shape == (2, 8)
            door.close()


ONE = np.array([1, 2])
BAD: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str, str, str]] = {
    "id": ({"user": np.array([50])}, {"outputs": ["user.embedding"]}, "INVALID_ARGUMENT", "400", "'user'"),
    "model": ({"user": ONE}, {"model": "other"}, "NOT_FOUND", "404", "'other'"),
    "version": ({"user": ONE}, {"model_version": "9"}, "NOT_FOUND", "404", "'9'"),
    "output": ({"user": ONE}, {"outputs": ["nothing"]}, "INVALID_ARGUMENT", "400", "'nothing'"),
    "kinds": ({"user": ONE}, {"outputs": ["output", "user.embedding"]}, "INVALID_ARGUMENT", "400", "two requests"),
    "absent": ({"user": ONE}, {"outputs": ["shop.embedding"]}, "INVALID_ARGUMENT", "400", "'shop.embedding'"),
    "dense": ({"user": ONE}, {}, "INVALID_ARGUMENT", "400", "dense"),
    "feature": (
        {"nobody": ONE},
        {"parameters": {"method": "lookup"}},
        "INVALID_ARGUMENT",
        "400",
        "unknown features 'nobody'",
    ),
    "datatype": ({"user": np.array([1.5])}, {}, "INVALID_ARGUMENT", "400", "FP64"),
    "float ids": ({"user": np.float32([1.5])}, {}, "INVALID_ARGUMENT", "400", "expected INT64 or INT32"),
    "dense type": (
        {"user": ONE, "dense": np.ones((2, 3))},
        {},
        "INVALID_ARGUMENT",
        "400",
        "'dense': got FP64, expected FP32",
    ),
    "no input": (
        {"user": ONE, "age": np.float32([1, 2])},
        {},
        "INVALID_ARGUMENT",
        "400",
        "'age': got FP32, which no input",
    ),
    "negative length": (
        {"user.values": ONE, "user.lengths": np.int32([4, -1])},
        {},
        "INVALID_ARGUMENT",
        "400",
        "'user.lengths': sample 1 has -1, expected 0 or more ids",
    ),
    "no lengths": ({"user.values": ONE}, {}, "INVALID_ARGUMENT", "400", "'user.lengths'"),
    "no values": ({"user.lengths": np.int32([1])}, {}, "INVALID_ARGUMENT", "400", "'user.values'"),
    "sum": ({"user.values": ONE, "user.lengths": np.int32([3])}, {}, "INVALID_ARGUMENT", "400", "sum of the lengths"),
    "negative": (
        {"user.values": ONE, "user.lengths": np.int32([3, -1])},
        {"parameters": {"method": "lookup"}},
        "INVALID_ARGUMENT",
        "400",
        "got -1",
    ),
    "samples": ({"user": ONE, "shop": np.array([1])}, {}, "INVALID_ARGUMENT", "400", "got 1 samples, expected 2"),
    "weights": (
        {"user.values": ONE, "user.lengths": np.int32([2]), "user.weights": np.float32([1])},
        {},
        "INVALID_ARGUMENT",
        "400",
        "one weight an id",
    ),
    "batch": (
        {"user": np.zeros(65, np.int64)},
        {"parameters": {"method": "lookup"}},
        "INVALID_ARGUMENT",
        "400",
        "expected 1 to 64",
    ),
    "huge empty batch": (
        {"user": np.zeros((2**31 - 1, 0), np.int64)},
        {"parameters": {"method": "lookup"}},
        "INVALID_ARGUMENT",
        "400",
        "expected 1 to 64",
    ),
    "batch beyond our messages": (
        {"user": np.zeros((2**31, 0), np.int64)},
        {"parameters": {"method": "lookup"}},
        "INVALID_ARGUMENT",
        "400",
        "2^31 - 1",
    ),
    "method": ({"user": ONE}, {"parameters": {"method": "drop"}}, "INVALID_ARGUMENT", "400", "'drop'"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_errors_say_what_is_wrong(door: Admission, case: str):
    arrays, how, code, http, words = BAD[case]
    with pytest.raises(InferenceServerException) as caught:
        door.infer(arrays, **how)
    expected = f"StatusCode.{code}" if door.library is triton_grpc else http
    assert (caught.value.status(), words in caught.value.message()) == (expected, True), caught.value


def test_typed_contents(server: Server, predictor: Predictor):
    dense, kjt = make_request(2, 3)
    inputs = [
        {"name": "dense", "datatype": "FP32", "shape": dense.shape, "contents": {"fp32_contents": dense.reshape(-1)}}
    ]
    fields = {"int64": ("INT64", "int64_contents"), "int32": ("INT32", "int_contents")}
    for name, array in jagged(kjt).items():
        datatype, field = fields[array.dtype.name]
        inputs.append({"name": name, "datatype": datatype, "shape": array.shape, "contents": {field: array}})
    request = pb.ModelInferRequest(model_name="tiny", inputs=inputs)
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary(f"/{SERVICE_NAME}/ModelInfer")
        answer = pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=60))
        got = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(answer.outputs[0].shape)
        np.testing.assert_allclose(got, predictor.predict(dense, kjt)["output"].numpy(), atol=1e-6)
        for change, words in (
            ({"raw_input_contents": [b""]}, "raw_input_contents: got 1 entries"),
            ({"raw_input_contents": [b""] * len(inputs)}, "contents and raw_input_contents"),
        ):
            broken = pb.ModelInferRequest(model_name="tiny", inputs=inputs, **change)
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT") as caught:
                call(broken.SerializeToString(), timeout=60)
            assert words in caught.value.details()


def post(server: Server, body: bytes, path: str = "/v2/models/tiny/infer", **headers: str) -> tuple[int, Any]:
    names = {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}", body, names, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_plain_json(server: Server, predictor: Predictor):
    dense, kjt = make_request(5, 2)
    inputs = [{"name": "dense", "datatype": "FP32", "shape": [2, NUM_DENSE], "data": dense.tolist()}]
    for name, array in jagged(kjt).items():
        datatype = array.dtype.name.upper()
        inputs.append({"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.tolist()})
    code, answer = post(server, json.dumps({"id": "a", "inputs": inputs}).encode())
    assert code == 200, answer
    output = answer.pop("outputs")[0]
    assert answer == {"model_name": "tiny", "model_version": "3", "id": "a"}
    expected = predictor.predict(dense, kjt)["output"]
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), expected.numpy(), atol=1e-6)


def test_what_overflows_to_nan_is_an_error_in_json_too(server: Server, predictor: Predictor):
    dense, kjt = make_request(5, 1)
    weight = next(p for name, p in build_model().dense_arch.named_parameters() if name.endswith("weight"))
    dense[0] = 3.4e38 * weight[weight.abs().sum(1).argmax()].sign()  # the next layer adds infinities of both signs
    assert predictor.predict(dense, kjt)["output"].isnan().all()
    inputs = [{"name": "dense", "datatype": "FP32", "shape": [1, NUM_DENSE], "data": dense.tolist()}]
    for name, array in jagged(kjt).items():
        inputs.append(
            {"name": name, "datatype": array.dtype.name.upper(), "shape": [array.size], "data": array.tolist()}
        )
    code, answer = post(server, json.dumps({"inputs": inputs}).encode())
    assert code == 400, answer
    assert "output 'output': sample 0 is NaN, though all inputs are finite" in answer["error"]


TENSOR = {"name": "user", "datatype": "INT64", "shape": [2]}
BODIES: dict[str, tuple[Any, dict[str, str], str]] = {
    "no json": (b"{", {}, "not JSON"),
    "a list": (b"[]", {}, "list"),
    "inputs": ({"inputs": 3}, {}, "inputs"),
    "nothing": ({}, {}, "features.keys"),
    "shape": ({"inputs": [{**TENSOR, "shape": "2"}]}, {}, "shape"),
    "bool shape": ({"inputs": [{**TENSOR, "shape": [True]}]}, {}, "shape"),
    "negative shape": ({"inputs": [{**TENSOR, "shape": [-1, -2], "data": [1, 2]}]}, {}, "shape"),
    "no data": ({"inputs": [TENSOR]}, {}, "no data"),
    "text": ({"inputs": [{**TENSOR, "data": ["a", "b"]}]}, {}, "INT64"),
    "bool": ({"inputs": [{**TENSOR, "data": [True, False]}]}, {}, "INT64"),
    "float": ({"inputs": [{**TENSOR, "data": [1.0, 2.0]}]}, {}, "INT64"),
    "too large": ({"inputs": [{**TENSOR, "data": [2**63, 1]}]}, {}, "INT64"),
    "ragged": ({"inputs": [{**TENSOR, "data": [[1], [1, 2]]}]}, {}, "INT64"),
    "wrong count": ({"inputs": [{**TENSOR, "data": [1, 2, 3]}]}, {}, "3 elements"),
    "twice": ({"inputs": [{**TENSOR, "data": [1, 2]}] * 2}, {}, "more than once"),
    "header": ({}, {"Inference_Header_Content_Length": "99"}, "Inference-Header-Content-Length"),
    "header text": ({}, {"Inference_Header_Content_Length": "-1"}, "Inference-Header-Content-Length"),
    "header digits": ({}, {"Inference_Header_Content_Length": "9" * 5000}, "Inference-Header-Content-Length"),
    "encoding": (b"no gzip", {"Content-Encoding": "gzip"}, "cannot be read"),
    "binary size": ({"inputs": [{**TENSOR, "parameters": {"binary_data_size": 16}}]}, {}, "binary_data_size"),
    "surrogate": (
        b'{"inputs": [{"name": "\\ud800", "datatype": "INT64", "shape": [1], "data": [1]}]}',
        {},
        "surrogate",
    ),
}


FLOATS = {"name": "dense", "datatype": "FP32", "shape": [1, NUM_DENSE]}
BODIES |= {
    "true among ids": ({"inputs": [{**TENSOR, "data": [3, True]}]}, {}, "'user': got true at position 1"),
    "true in a row": ({"inputs": [{**TENSOR, "shape": [2, 2], "data": [[3, 4], [True, 5]]}]}, {}, "true at position 2"),
    "null among ids": ({"inputs": [{**TENSOR, "data": [3, None]}]}, {}, "got null at position 1"),
    "true among numbers": ({"inputs": [{**FLOATS, "data": [0.5, True, 1]}]}, {}, "'dense': got true at position 1"),
    "beyond float64": ({"inputs": [{**FLOATS, "data": [0, 10**400]}]}, {}, "at position 1 of data"),
    "beyond INT32": ({"inputs": [{**TENSOR, "datatype": "INT32", "data": [1, 2**31]}]}, {}, "number of INT32"),
    "input without a name": ({"inputs": [{"datatype": "INT64"}]}, {}, "inputs[0].name: got none, expected a string"),
    "name is a number": ({"inputs": [{**TENSOR, "name": 3}]}, {}, "inputs[0].name: got 3, expected a string"),
    "no list of inputs": ({"inputs": 3}, {}, "inputs: got 3, expected a list of objects"),
    "output is text": ({"inputs": [], "outputs": ["x"]}, {}, "outputs: got a list of 1, expected a list of objects"),
    "shape is text": ({"inputs": [{**TENSOR, "shape": "2"}]}, {}, "the shape '2', expected a list of integers"),
    "data is text": ({"inputs": [{**TENSOR, "data": "1"}]}, {}, "'user': got the data '1', expected a list"),
    "key twice": (b'{"inputs": [], "inputs": []}', {}, "the key 'inputs' more than once"),
    "method number": ({"inputs": [], "parameters": {"method": 3}}, {}, "parameter method: got 3, expected a string"),
    "binary_data number": (
        {"inputs": [], "outputs": [{"name": "output", "parameters": {"binary_data": 1}}]},
        {},
        "output 'output': parameter binary_data: got 1, expected true or false",
    ),
}


@pytest.mark.parametrize("case", list(BODIES))
def test_hostile_bodies(server: Server, case: str):
    body, headers, words = BODIES[case]
    code, answer = post(server, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers)
    assert (code, words in answer["error"]) == (400, True), answer


@pytest.mark.parametrize("number", ["1e20", "100000000000000000000", "9223372036854775808", "18446744073709551616"])
def test_fp32_takes_integers_beyond_64_bits(server: Server, predictor: Predictor, number: str):
    _, kjt = make_request(5, 1)
    inputs = [{**FLOATS, "data": "DENSE"}]
    for name, array in jagged(kjt).items():
        datatype = array.dtype.name.upper()
        inputs.append({"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.tolist()})
    text = json.dumps({"inputs": inputs}).replace('"DENSE"', f"[{', '.join(['-1', number, *['0'] * (NUM_DENSE - 2)])}]")
    code, answer = post(server, text.encode())
    assert code == 200, answer
    dense = torch.tensor([[-1.0, float(number), *[0.0] * (NUM_DENSE - 2)]])
    expected = predictor.predict(dense, kjt)["output"].reshape(-1)
    np.testing.assert_allclose(answer["outputs"][0]["data"], expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("where", ["request", "input", "output"])
@pytest.mark.parametrize("name", ["classification", "shared_memory_region", "sequence_id", "sequence_start"])
def test_parameters_that_change_the_answer_are_refused_by_name(door: Admission, where: str, name: str):
    value = "region" if name == "shared_memory_region" else name == "sequence_start" or 7
    tensor, output = door.tensor("user", ONE), door.library.InferRequestedOutput("user.embedding")
    more: dict[str, Any] = {}
    if where == "request" and name == "sequence_id":
        more = {"sequence_id": 7}
    elif where == "request" and name == "sequence_start":
        more = {"sequence_id": 7, "sequence_start": True}
    elif where == "request":
        more = {"parameters": {name: value}}
    else:
        given = tensor if where == "input" else output
        if door.library is triton_grpc:
            kind = {str: "string_param", bool: "bool_param", int: "int64_param"}[type(value)]
            setattr(given._get_tensor().parameters[name], kind, value)
        else:
            given._parameters[name] = value
    with pytest.raises(InferenceServerException, match="sequence_" if more.get("sequence_id") else name) as caught:
        door.client.infer("tiny", [tensor], outputs=[output], **more)
    assert caught.value.status() in ("StatusCode.INVALID_ARGUMENT", "400"), caught.value


def test_hints_of_a_client_have_no_effect(door: Admission):
    plain = door.infer({"user": ONE}, outputs=["user.embedding"]).as_numpy("user.embedding")
    hinted = door.infer({"user": ONE}, outputs=["user.embedding"], timeout=10_000_000, priority=1)
    np.testing.assert_array_equal(hinted.as_numpy("user.embedding"), plain)


@pytest.mark.parametrize("kind", ["int64_param", "bool_param", "double_param"])
def test_a_method_that_is_no_string_is_refused_over_grpc(server: Server, kind: str):
    request = pb.ModelInferRequest(model_name="tiny", parameters={"method": pb.InferParameter(**{kind: 1})})
    refused = pytest.raises(grpc.RpcError, match="parameter method")
    with grpc.insecure_channel(server.target) as channel, refused as caught:
        channel.unary_unary(f"/{SERVICE_NAME}/ModelInfer")(request.SerializeToString(), timeout=60)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


UNKNOWN: dict[str, tuple[str, str, int, str]] = {
    "nothing": ("GET", "/v2/nothing", 404, "'/v2/nothing'"),
    "top": ("GET", "/nothing", 404, "expected /v2"),
    "no model": ("POST", "/v2/models//infer", 404, "'/v2/models//infer'"),
    "two parts": ("GET", "/v2/models/a/b", 404, "MODEL"),
    "long": ("GET", "/v2/" + "x" * 4000, 404, "(4004 characters)"),
    "no text": ("GET", "/v2/nothing/%ff%22", 404, "/v2/nothing"),
    "method": ("GET", "/v2/models/tiny/infer", 405, "expected POST"),
    "another verb of V1": (
        "POST",
        "/v1/models/tiny:classify",
        405,
        "or POST to /v2/models/MODEL/infer or /v1/models/MODEL:predict or /v1/models/MODEL:lookup",
    ),
    "another method": ("DELETE", "/v2/models/tiny", 405, "expected GET or HEAD"),
    "patch": ("PATCH", "/v2", 405, "'PATCH'"),
}


@pytest.mark.parametrize("case", list(UNKNOWN))
def test_unknown_paths_and_methods_are_answered_in_json(server: Server, case: str):
    method, path, status, words = UNKNOWN[case]
    request = urllib.request.Request(f"http://127.0.0.1:{server.http_port}{path}", method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    answer = json.loads(caught.value.read())
    assert caught.value.code == status
    assert caught.value.headers["Content-Type"].startswith("application/json")
    assert (list(answer), words in answer["error"]) == (["error"], True), answer
    if status == 405:
        assert caught.value.headers["Allow"]


def test_tritonclient_gets_errors_for_endpoints_that_recinfer_lacks(server: Server):
    client = triton_http.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    for call in (
        lambda: client.infer("", []),
        lambda: client.get_model_config("tiny"),
        lambda: client.get_inference_statistics("tiny"),
        client.get_model_repository_index,
    ):
        with pytest.raises(InferenceServerException, match="path: got") as caught:
            call()
        assert caught.value.status() == "404"
    client.close()


def test_too_large_a_body_is_refused(server: Server):
    code, answer = post(server, b" " * ((1 << 20) + 1))
    assert code == 413 and "1048576" in answer["error"]


def test_requests_are_counted_and_reflection_lists_the_service(server: Server):
    post(server, b"{")
    until(lambda: server.stats.requests().get(("ModelInfer", "INVALID_ARGUMENT"), 0) >= 1)  # once it is sent
    with grpc.insecure_channel(server.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
        ]
        listed, file = stub.ServerReflectionInfo(iter(ask), timeout=60)
    assert SERVICE_NAME in [service.name for service in listed.list_services_response.service]
    assert len(file.file_descriptor_response.file_descriptor_proto) == 1


def test_a_second_try_holds_no_more_of_the_memory_budget(server: Server, monkeypatch: pytest.MonkeyPatch):
    """A request whose version was unloaded meanwhile is tried again; what it holds was counted at the first try."""
    held: list[int] = []
    dispatch = Dispatcher.dispatch

    def seen(dispatcher: Dispatcher, request: Request) -> None:
        held.append(request.ticket.held)
        if len(held) == 1:
            request.reply(NotFoundError("it was unloaded"))
        else:
            dispatch(dispatcher, request)

    monkeypatch.setattr(Dispatcher, "dispatch", seen)
    ids = np.arange(1000) % 40
    tensor = pb.ModelInferRequest.InferInputTensor(name="user", datatype="INT64", shape=[50, 20])
    request = pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[ids.tobytes()])
    request.outputs.add(name="user.embedding")
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary(f"/{SERVICE_NAME}/ModelInfer")
        answer = pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=60))
    assert answer.outputs[0].shape == [50, DIM]
    assert len(held) == 2 and held[0] == held[1] > 2 * ids.nbytes
