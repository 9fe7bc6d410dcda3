"""Named inputs, facts and computed ids: one answer and one error text over every protocol, and the signature they describe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.server.server import Server
from recinfer.serving.wire import json_codec
from recinfer.serving.wire.arrays import encode_predict_request
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tests.serving.named_models import Asked, ask_hashed, ask_priced, build, make_archive
from tests.serving.remote.fleet import remote
from tests.serving.v1 import ask, columns_of, get, post, rows_of

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
triton_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed (the dev extra)")
triton_http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed (the dev extra)")
from tritonclient.utils import InferenceServerException  # noqa: E402

MODELS = ("priced", "hashed")
DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "float64": "FP64", "bool": "BOOL"}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_archive(tmp_path_factory.mktemp(name), name) for name in MODELS}


@pytest.fixture(scope="module")
def models(archives: dict[str, Path]) -> dict[str, Predictor]:
    return {name: load(path) for name, path in archives.items()}


@pytest.fixture(scope="module")
def server(models: dict[str, Predictor]) -> Iterator[Server]:
    with Server(models, http_port=0, limits=Limits(max_ids=2000)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[InferenceClient]:
    with InferenceClient(server.target, model="priced", timeout=60) as opened:
        yield opened


def asked_of(model: str, batch: int, seed: int = 0) -> Asked:
    return (ask_priced if model == "priced" else ask_hashed)(batch, seed)


# -- the ways in, each from a request to arrays by name; errors are InputErrors with the server's text


def over_grpc(server: Server, asked: Asked) -> Any:
    with InferenceClient(server.target, model=asked.model, timeout=60) as client:
        return client.predict(features=asked.features, inputs=asked.inputs)


def over_grpc_from_lists(server: Server, asked: Asked) -> Any:
    with InferenceClient(server.target, model=asked.model, timeout=60, tensors=False) as client:
        return client.predict(None, columns_of(asked.features), inputs=lists_of(asked))


def over_asyncio(server: Server, asked: Asked) -> Any:
    async def call() -> Any:
        async with AsyncInferenceClient(server.target, model=asked.model, timeout=60) as client:
            return await client.predict(features=asked.features, inputs=asked.inputs)

    return asyncio.run(call())


def over_v1_rows(server: Server, asked: Asked) -> Any:
    columns = lists_of(asked)
    rows = [row | {k: column[i] for k, column in columns.items()} for i, row in enumerate(rows_of(asked.features))]
    found = checked(ask(server, f"{asked.model}:predict", {"instances": rows}))["predictions"]
    return {next(iter(outputs_of(asked))): found}


def over_v1_columns(server: Server, asked: Asked) -> Any:
    body = {"inputs": columns_of(asked.features) | lists_of(asked)}
    return {next(iter(outputs_of(asked))): checked(ask(server, f"{asked.model}:predict", body))["outputs"]}


def over_v2_json(server: Server, asked: Asked) -> Any:
    inputs = [
        {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape), "data": array.tolist()}
        for name, array in tensors_of(asked).items()
    ]
    outputs = checked(post(server, f"/v2/models/{asked.model}/infer", {"inputs": inputs}))["outputs"]
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in outputs}


def over_triton_grpc(server: Server, asked: Asked) -> Any:
    return over_triton(triton_grpc, server.target, asked)


def over_triton_http(server: Server, asked: Asked) -> Any:
    return over_triton(triton_http, f"127.0.0.1:{server.http_port}", asked)


def over_triton(library: Any, target: str, asked: Asked) -> Any:
    client = library.InferenceServerClient(target)
    tensors = []
    for name, array in tensors_of(asked).items():
        tensors.append(library.InferInput(name, list(array.shape), DATATYPES[array.dtype.name]))
        tensors[-1].set_data_from_numpy(array)
    try:
        found = client.infer(asked.model, tensors)
    except InferenceServerException as error:
        raise InputError(error.message()) from None
    finally:
        client.close()
    return {name: found.as_numpy(name) for name in outputs_of(asked)}


WAYS: list[Callable[[Server, Asked], Any]] = [
    over_grpc,
    over_grpc_from_lists,
    over_asyncio,
    over_v1_rows,
    over_v1_columns,
    over_v2_json,
    over_triton_grpc,
    over_triton_http,
]


def lists_of(asked: Asked) -> dict[str, list[Any]]:
    """The named inputs as JSON has them."""
    found = {}
    for name, value in asked.inputs.items():
        if isinstance(value, JaggedTensor):
            found[name] = [part.tolist() for part in value.values().split(value.lengths().tolist())]
        else:
            found[name] = value.tolist()
    return found


def tensors_of(asked: Asked) -> dict[str, np.ndarray]:
    """All inputs as the Open Inference Protocol has them."""
    found: dict[str, np.ndarray] = {}
    jagged = {name: value for name, value in asked.inputs.items() if isinstance(value, JaggedTensor)}
    for name, one in (asked.features.to_dict() | jagged).items():
        found |= {f"{name}.values": one.values().numpy(), f"{name}.lengths": one.lengths().int().numpy()}
    return found | {name: value.numpy() for name, value in asked.inputs.items() if isinstance(value, Tensor)}


def outputs_of(asked: Asked) -> list[str]:
    return ["score"] if asked.model == "priced" else ["output"]


def checked(answer: tuple[int, Any, Any]) -> Any:
    code, _, found = answer
    if code != 200:
        assert code == 400, (code, found)
        raise InputError(found["error"])
    return found


# -- answers


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_every_protocol_gives_the_model_s_numbers(
    server: Server, models: dict[str, Predictor], model: str, batch: int
) -> None:
    asked = asked_of(model, batch, seed=batch)
    with torch.no_grad():
        eager = build(model)(*asked.args)
    eager = eager["score"] if isinstance(eager, dict) else eager
    (mine,) = models[model].predict(None, asked.features, inputs=asked.inputs).values()
    torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-6)
    for way in WAYS:
        (found,) = way(server, asked).values()
        np.testing.assert_allclose(np.asarray(found, np.float32), mine.numpy(), rtol=0, atol=1e-6, err_msg=way.__name__)


def test_a_context_goes_with_named_inputs(client: InferenceClient, models: dict[str, Predictor]) -> None:
    asked = ask_priced(5, seed=1, user=False)
    everyone = KeyedJaggedTensor(
        ["user", *asked.features.keys()],
        torch.cat([torch.full((5,), 7), asked.features.values()]),
        lengths=torch.cat([torch.ones(5, dtype=torch.int32), asked.features.lengths()]),
    )
    want = models["priced"].predict(None, everyone, inputs=asked.inputs)["score"]
    mine = models["priced"].predict(None, asked.features, {"user": [7]}, asked.inputs)["score"]
    found = client.predict(features=asked.features, context={"user": [7]}, inputs=asked.inputs)["score"]
    torch.testing.assert_close(mine, want)
    torch.testing.assert_close(found, want)


def test_a_context_holds_named_inputs_too(
    server: Server, client: InferenceClient, models: dict[str, Predictor]
) -> None:
    asked = ask_priced(5, seed=4)
    rest = {name: value for name, value in asked.inputs.items() if name not in ("weekday", "price", "flag")}
    everyone = asked.inputs | {
        "weekday": torch.full((5,), 3),
        "price": torch.tensor([[0.5, 0.25]] * 5),
        "flag": torch.ones(5).bool(),
    }
    want = models["priced"].predict(None, asked.features, inputs=everyone)["score"]
    columns = columns_of(asked.features)
    columns["user"] = [[9]] * 5
    want_user = models["priced"].predict(None, columns, inputs=everyone)["score"]
    once = {"weekday": [3], "price": [[0.5, 0.25]], "flag": [True]}
    torch.testing.assert_close(
        client.predict(None, columns_of(asked.features), context=once, inputs=rest)["score"], want
    )
    del columns["user"]
    found = client.predict(None, columns, context={"user": [9], **once}, inputs=rest)["score"]
    torch.testing.assert_close(found, want_user)
    torch.testing.assert_close(models["priced"].predict(None, columns, {"user": [9], **once}, rest)["score"], want_user)
    named = {"price": [0.5, 0.25], "weekday": 3, "flag": True}
    body = {"context": {"user": [9], **named}, "inputs": columns | {"history_price": lists_of(asked)["history_price"]}}
    v1 = checked(ask(server, "priced:predict", body))["outputs"]
    np.testing.assert_allclose(v1, want_user.numpy(), rtol=0, atol=1e-6)
    rows = [dict(zip(body["inputs"], cells)) for cells in zip(*body["inputs"].values())]
    v1 = checked(ask(server, "priced:predict", {"context": body["context"], "instances": rows}))["predictions"]
    np.testing.assert_allclose(v1, want_user.numpy(), rtol=0, atol=1e-6)
    arrays = tensors_of(asked)
    for name in ("user.values", "user.lengths", *once):
        del arrays[name]
    arrays["context.user.values"], arrays["context.user.lengths"] = np.array([9]), np.array([1], np.int32)
    arrays |= {"context.price": np.float32([[0.5, 0.25]]), "context.weekday": np.array([3])}
    arrays["context.flag"] = np.array([True])
    triton = triton_grpc.InferenceServerClient(server.target)
    tensors = [triton_grpc.InferInput(n, list(a.shape), DATATYPES[a.dtype.name]) for n, a in arrays.items()]
    for tensor, array in zip(tensors, arrays.values()):
        tensor.set_data_from_numpy(array)
    v2 = triton.infer("priced", tensors).as_numpy("score")
    triton.close()
    np.testing.assert_allclose(v2, want_user.numpy(), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="context: got 'prize', which is no input of this model"):
        checked(ask(server, "priced:predict", body | {"context": {"prize": 1}}))
    with pytest.raises(InputError, match="context: input 'flag' is also in inputs"):
        client.predict(None, columns, context={"user": [9], **once}, inputs=asked.inputs)
    with pytest.raises(InputError, match="input 'weekday': got shape"):
        client.predict(None, columns, context={"user": [9], **once, "weekday": [[3, 4]]}, inputs=rest)


def test_a_context_goes_with_computed_ids(server: Server, models: dict[str, Predictor]) -> None:
    asked = ask_hashed(3)
    shops = KeyedJaggedTensor(["item"], asked.features["item"].values(), lengths=asked.features["item"].lengths())
    with InferenceClient(server.target, model="hashed", timeout=60) as client:
        found = client.predict(features=shops, context={"shop": [[4, 5]]}, inputs=asked.inputs)["output"]
    everything = shops.to_dict()
    columns = columns_of(shops) | {"shop": [[4, 5]] * 3}
    assert set(everything) == {"item"}
    torch.testing.assert_close(found, models["hashed"].predict(None, columns, inputs=asked.inputs)["output"])


def test_rows_by_name(client: InferenceClient, models: dict[str, Predictor]) -> None:
    asked = ask_priced(5)
    columns = lists_of(asked)
    rows = [row | {k: column[i] for k, column in columns.items()} for i, row in enumerate(rows_of(asked.features))]
    rows[2] = rows[2] | {"slot": [1]}
    names = [one.name for one in client.get_model().named_inputs]
    found = list(client.predict_many(rows, batch_size=3, inputs=names))
    want = models["priced"].predict(None, asked.features, inputs=asked.inputs)["score"]
    assert [row.index for row in found if row.error is None] == [0, 1, 3, 4]
    assert "'slot': sample 0 has 1 values" in str(found[2].error)
    for row in found:
        if row.outputs is not None:
            torch.testing.assert_close(row.outputs["score"], want[row.index])


def test_torchserves_json(models: dict[str, Predictor]) -> None:
    asked = ask_priced(4)
    body = {"features": columns_of(asked.features), "inputs": lists_of(asked)}
    message = pb.PredictRequest.FromString(json_codec.predict_request(json.loads(json.dumps(body))))
    assert [one.name for one in message.inputs] == ["price", "weekday", "flag", "history_price"]
    want = models["priced"].predict(None, asked.features, inputs=asked.inputs)["score"]
    from recinfer.serving.engine.decoded_path import InferenceService
    from recinfer.serving.engine.registry import ModelRegistry

    service = InferenceService(ModelRegistry({"priced": models["priced"]}))
    decoded = service.decode("Predict", message.SerializeToString())
    assert decoded.given is not None and decoded.given.inputs is not None
    found = models["priced"].predict(None, decoded.features, inputs=decoded.given.inputs)["score"]
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("model", MODELS)
def test_a_ranker_runs_both_programs(
    archives: dict[str, Path], models: dict[str, Predictor], model: str, tmp_path: Path
) -> None:
    with remote(archives[model], [[0], [1]], tmp_path) as ranker, Server({model: ranker}, http_port=0) as server:
        for batch in (1, 64):
            asked = asked_of(model, batch)
            (want,) = models[model].predict(None, asked.features, inputs=asked.inputs).values()
            for way in (over_grpc, over_v1_rows, over_triton_grpc):
                (found,) = way(server, asked).values()
                np.testing.assert_allclose(np.asarray(found, np.float32), want.numpy(), rtol=0, atol=1e-6)


# -- errors


def without(name: str) -> Callable[[Asked], None]:
    return lambda asked: asked.inputs.pop(name)  # type: ignore[no-any-return]


def with_value(name: str, make: Callable[[Any], Any]) -> Callable[[Asked], None]:
    return lambda asked: asked.inputs.update({name: make(asked.inputs[name])})


def nan_at_two(price: Tensor) -> Tensor:
    return price.clone().index_fill_(0, torch.tensor([2]), float("inf"))


def other_lengths(paid: JaggedTensor) -> JaggedTensor:
    lengths = paid.lengths().clone()
    lengths[3] += 1
    return JaggedTensor(torch.cat([paid.values(), torch.ones(1)]), lengths=lengths)


WRONG: dict[str, tuple[Callable[[Asked], Any], str]] = {
    "missing": (without("weekday"), "inputs: 'weekday' is missing; expected int64 [5]"),
    "shape": (
        with_value("price", lambda price: torch.cat([price, price], 1)),
        "input 'price': got shape [5, 4]; expected float32 [5, 2]",
    ),
    "samples": (
        with_value("price", lambda price: price[:3]),
        "input 'price': got shape [3, 2]; expected float32 [5, 2]",
    ),
    "rank": (
        with_value("weekday", lambda days: days[:, None]),
        "input 'weekday': got shape [5, 1]; expected int64 [5]",
    ),
    "dtype": (
        with_value("weekday", lambda days: days + torch.full((5,), 0.5)),
        "input 'weekday': got float",
    ),
    "infinity": (with_value("price", nan_at_two), "input 'price': sample 2 has inf; expected finite numbers"),
    "as long as": (
        with_value("history_price", other_lengths),
        "input 'history_price': sample 3 has 1 values and 'history' 0; this model takes as many of both",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_protocol_says_the_same(server: Server, models: dict[str, Predictor], wrong: str) -> None:
    spoil, text = WRONG[wrong]
    asked = ask_priced(5, seed=2)
    spoil(asked)
    with pytest.raises(InputError) as mine:
        models["priced"].predict(None, asked.features, inputs=asked.inputs)
    assert text in str(mine.value)
    for way in WAYS:
        if wrong == "samples" and way is over_v1_rows:
            continue  # rows have one length
        if wrong == "infinity" and way in (over_v1_rows, over_v1_columns, over_v2_json):
            continue  # JSON has no infinity
        with pytest.raises(InputError) as theirs:
            way(server, asked)
        if wrong == "samples" and way is over_v1_columns:
            assert "inputs['price']: got 3 samples, expected 5" in str(theirs.value)
        else:
            assert text in str(theirs.value), way.__name__


def test_facts_of_features_name_the_sample(server: Server, models: dict[str, Predictor]) -> None:
    asked = ask_priced(3)
    columns = columns_of(asked.features)
    columns["slot"][1] = [4]
    text = "feature 'slot': sample 1 has 1 values; this model takes exactly 2 of every sample"
    with pytest.raises(InputError, match=text):
        models["priced"].predict(None, columns, inputs=asked.inputs)
    with InferenceClient(server.target, model="priced", timeout=60) as client, pytest.raises(InputError, match=text):
        client.predict(None, columns, inputs=asked.inputs)
    body = {"inputs": columns | lists_of(asked)}
    with pytest.raises(InputError, match=text):
        checked(ask(server, "priced:predict", body))


def test_an_object_among_numbers_is_named(server: Server) -> None:
    """Not the number, which is right."""
    asked = ask_priced(3)
    body = {"inputs": columns_of(asked.features) | lists_of(asked)}
    body["inputs"]["weekday"][1] = {"values": [1]}
    with pytest.raises(InputError, match=r"inputs\['weekday'\]\[1\]: got an object, expected a number"):
        checked(ask(server, "priced:predict", body))


def test_a_context_alone_has_no_samples(server: Server) -> None:
    body = {"inputs": [{"name": "context.user", "datatype": "INT64", "shape": [1], "data": [3]}]}
    with pytest.raises(InputError, match="inputs: got a context without samples"):
        checked(post(server, "/v2/models/priced/infer", body))


def raw(**fields: Any) -> bytes:
    """A request of two samples whose input ``price`` has these fields."""
    asked = ask_priced(2)
    inputs = {name: value for name, value in asked.inputs.items() if name != "price"}
    one = {"name": "price", "dtype": "float32", "shape": [2, 2], "values": bytes(16)} | fields
    rest = pb.PredictRequest(inputs=[pb.NamedInput(**one)]).SerializeToString()
    return encode_predict_request(None, asked.features, "priced", inputs=inputs) + rest


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": ({"values": bytes(15)}, "input 'price': values: got 15 bytes, expected a multiple of 4"),
    "elements": ({"values": bytes(20)}, "expected 16 bytes"),
    "dtype": ({"dtype": "complex64"}, "input 'price': got dtype 'complex64', expected one of float32, "),
    "no dtype": ({"dtype": ""}, "input 'price': got dtype '', expected one of float32, "),
    "negative size": ({"shape": [-1, 2]}, "input 'price': got shape [-1, 2]"),
    "huge size": ({"shape": [0, 1 << 62], "values": b""}, "input 'price': got shape [0, 4611686018427387904]"),
    "many sizes": ({"shape": [1] * 9, "values": bytes(4)}, "expected at most 8 sizes"),
    "bool": ({"dtype": "bool", "values": b"\x00\x02\x00\x01"}, "got the byte 2 at position 1 of bool values"),
    "lengths": ({"lengths": bytes(4)}, "input 'price': lengths: got 4 bytes (1 int32), expected 8 bytes"),
    "jagged": ({"lengths": bytes(8)}, "input 'price': got lists that differ in length, or values with lengths"),
    "weights": ({"weights": bytes(8)}, "input 'price': got weights without lengths"),
    "twice": ({"name": "flag"}, "inputs: got 'flag' more than once"),
    "unknown": ({"name": "prize"}, "inputs: got 'prize'; this model takes 'price', 'weekday', 'flag', 'history_price'"),
}


@pytest.mark.parametrize("wrong", MALFORMED)
def test_malformed_messages(client: InferenceClient, wrong: str) -> None:
    fields, text = MALFORMED[wrong]
    with pytest.raises(InputError) as error:
        client._call("Predict", raw(**fields), None)
    assert text in str(error.value)


def test_limits_count_values_and_inputs(client: InferenceClient) -> None:
    asked = ask_priced(2)
    asked.inputs["history_price"] = (np.zeros(3000, np.float32), [1500, 1500])
    with pytest.raises(
        InputError, match="'history_price': got 3000 values in all jagged inputs, expected at most 2000"
    ):
        client.predict(features=asked.features, inputs=asked.inputs)
    many = {f"x{at}": [1.0, 2.0] for at in range(5000)}
    with pytest.raises(InputError, match="inputs: got more than 4096"):
        client.predict(features=asked.features, inputs=many)


def test_negative_lengths(client: InferenceClient) -> None:
    asked = ask_priced(2)
    lengths = np.array([-1, 3], np.int32)
    with pytest.raises(InputError, match="'history_price': got a length of -1"):
        client.predict(features=asked.features, inputs=asked.inputs | {"history_price": (np.ones(2), lengths)})
    bad = pb.NamedInput(name="history_price", dtype="float32", shape=[2], values=bytes(8), lengths=lengths.tobytes())
    inputs = {name: value for name, value in asked.inputs.items() if name != "history_price"}
    message = encode_predict_request(None, asked.features, "priced", inputs=inputs)
    message += pb.PredictRequest(inputs=[bad]).SerializeToString()
    with pytest.raises(InputError, match="input 'history_price': got the length -1 of sample 0"):
        client._call("Predict", message, None)


def test_lookups_of_computed_ids_are_refused(server: Server, models: dict[str, Predictor]) -> None:
    with InferenceClient(server.target, model="hashed", timeout=60) as client:
        for look in (models["hashed"].lookup, client.lookup):
            with pytest.raises(InputError, match="feature 'item': this model computes ids from it"):
                look({"item": [[1]]})


# -- descriptions


def test_clients_read_the_signature(client: InferenceClient) -> None:
    described = {one.name: one for one in client.get_model().inputs}
    assert list(described) == ["price", "weekday", "flag", "user", "history", "slot", "history_price"]
    assert described["price"].expected() == "float32 [batch, 2]"
    assert described["price"].shape == ("batch", 2)
    assert described["history_price"].expected() == "a list of float32 per sample"
    assert described["history_price"].facts == "as many as history"
    assert described["slot"].facts == "exactly 2 per sample"
    assert described["slot"].path == "features['slot']"


def test_open_inference_describes_the_inputs(server: Server) -> None:
    _, _, found = get(server, "/v2/models/priced")
    inputs = {one["name"]: one for one in found["inputs"]}
    shapes = {name: (one["datatype"], one["shape"]) for name, one in inputs.items()}
    assert shapes["price"] == ("FP32", [-1, 2])
    assert shapes["weekday"] == ("INT64", [-1])
    assert shapes["flag"] == ("BOOL", [-1])
    assert shapes["history_price.values"] == ("FP32", [-1])
    assert shapes["history_price.lengths"] == ("INT32", [-1])
    assert inputs["slot.values"]["parameters"] == {"facts": "exactly 2 per sample"}
    triton = triton_grpc.InferenceServerClient(server.target)
    over_grpc = triton.get_model_metadata("priced")
    triton.close()
    assert {one.name: (one.datatype, list(one.shape)) for one in over_grpc.inputs} == shapes


@pytest.mark.parametrize("model", MODELS)
def test_examples_of_the_document_are_answered(server: Server, model: str) -> None:
    _, _, document = get(server, "/openapi.json")
    sent = 0
    for path, item in document["paths"].items():
        if f"/{model}" not in path or "post" not in item or "{" in path:
            continue
        content = item["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            code, _, found = post(server, path, example["value"])
            assert code == 200, (path, example["value"], found)
            sent += 1
    assert sent


def test_v1_metadata_has_named_inputs(server: Server) -> None:
    _, _, found = get(server, "/v1/models/priced/metadata")
    inputs = found["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
    assert inputs["weekday"]["dtype"] == "DT_INT64"
    assert inputs["flag"]["dtype"] == "DT_BOOL"
    assert [one["size"] for one in inputs["price"]["tensor_shape"]["dim"]] == ["-1", "2"]
