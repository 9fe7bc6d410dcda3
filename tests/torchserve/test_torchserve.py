"""A real TorchServe on loopback gives the numbers of our server, through REST and gRPC, and errors with their code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.errors import InputError, RecinferError
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.client.torchserve import TorchServeClient
from recinfer.serving.mar import pack
from recinfer.serving.server.server import Server
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import ROWS, build_archive, make_request
from tests.torchserve.instance import TorchServe

pytestmark = pytest.mark.slow

OCTETS, JSON = "application/octet-stream", "application/json"
TOLERANCE = {"rtol": 0, "atol": 1e-6}


@pytest.fixture
def ours(server: Server) -> Iterator[InferenceClient]:
    """Our own gRPC server on the same archive."""
    with InferenceClient(server.target, timeout=60) as client:
        yield client


def over_grpc(torchserve: TorchServe, model: str, token: str | None = None) -> TorchServeClient:
    key = torchserve.inference_key if token is None else token
    return TorchServeClient(torchserve.grpc_target, model, token=key, timeout=120)


def as_json(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in jagged.to_dense()] for key, jagged in kjt.to_dict().items()}


@pytest.mark.parametrize("model", ["tiny", "zipped"])
@pytest.mark.parametrize("batch", [1, 33])
def test_same_numbers_through_every_protocol(torchserve: TorchServe, ours: InferenceClient, model: str, batch: int):
    dense, kjt = make_request(batch, batch)
    logits, embeddings = ours.predict(dense, kjt), ours.lookup(kjt)

    reply = torchserve.predict(model, codec.encode_predict_request(dense, kjt), OCTETS)
    assert (reply.code, reply.content_type) == (200, OCTETS), reply
    over_rest, version = codec.decode_predict_response(reply.body)
    assert version == "3"

    reply = torchserve.predict(model, codec.encode_lookup_request(kjt), OCTETS, X_Recinfer_Method="lookup")
    pooled, *_ = codec.decode_lookup_response(reply.body)
    assert pooled is not None and pooled.keys() == embeddings.keys()
    torch.testing.assert_close(pooled.values(), embeddings.pooled.values(), **TOLERANCE)

    body = json.dumps({"dense": dense.tolist(), "features": as_json(kjt)}).encode()
    reply = torchserve.predict(model, body, JSON)
    assert (reply.code, reply.content_type) == (200, JSON), reply
    over_json = {name: torch.tensor(values) for name, values in json.loads(reply.body)["outputs"].items()}

    with over_grpc(torchserve, model) as client:
        outputs = client.predict(dense, kjt)
        got = client.lookup(kjt)
    assert got.keys() == embeddings.keys()
    torch.testing.assert_close(got.pooled.values(), embeddings.pooled.values(), **TOLERANCE)
    for answer in (over_rest, over_json, outputs):
        assert answer.keys() == logits.keys()
        for name, tensor in logits.items():
            torch.testing.assert_close(answer[name], tensor, **TOLERANCE)


def test_client_accepts_the_inputs_of_recinfers_client(torchserve: TorchServe, ours: InferenceClient):
    dense = [[0.5, 1.0, -2.0], [0.0, 0.25, 3.0]]
    features = {"item": [5, 7], "history": [[], [1, 2]], "shop": np.array([4, 6])}
    context = {"user": [[3, 9]]}
    expected = ours.predict(dense, features, context=context)
    with over_grpc(torchserve, "tiny") as client:
        torch.testing.assert_close(client.predict(dense, features, context=context), dict(expected), **TOLERANCE)
        together = client.predict(np.array(dense), {**features, "user": [[3, 9]] * 2})
        torch.testing.assert_close(together, dict(expected), **TOLERANCE)
        found = client.lookup({"shop": [[3], []], "user": [1, 2]})
        pooled = ours.lookup({"shop": [[3], []], "user": [1, 2]}).pooled
        torch.testing.assert_close(found.pooled.values(), pooled.values(), **TOLERANCE)
        for dense_, features_, words in (
            ([1.0, 2.0], features, "dense: got shape"),
            (dense, {**features, "user": ["a", "b"]}, "'user'"),
            (None, features, "dense: got none, expected float32"),
        ):
            with pytest.raises(InputError, match=words):
                client.predict(dense_, features_)


def test_json_lookup_of_some_features(torchserve: TorchServe, ours: InferenceClient):
    body = b'{"features": {"shop": [3, 4], "user": [[1, 2], []]}}'
    reply = torchserve.predict("tiny", body, JSON, X_Recinfer_Method="lookup")
    kjt = KeyedJaggedTensor(["user", "shop"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 1]))
    answer = json.loads(reply.body)
    assert list(answer["embeddings"]) == ["user", "shop"]
    expected = ours.lookup(kjt).pooled.to_dict()
    for name, values in answer["embeddings"].items():
        torch.testing.assert_close(torch.tensor(values), expected[name], **TOLERANCE)


@pytest.mark.parametrize("model", ["tiny", "zipped"])
def test_errors_keep_their_code_and_message(torchserve: TorchServe, ours: InferenceClient, model: str):
    dense, kjt = make_request(1, 2)
    bad_id = KeyedJaggedTensor(["user"], torch.tensor([50]), lengths=torch.tensor([1]))
    with pytest.raises(InputError) as expected:
        ours.lookup(bad_id)
    with over_grpc(torchserve, model) as client:
        with pytest.raises(InputError) as caught:
            client.lookup(bad_id)
        assert str(caught.value).startswith(str(expected.value))
        with pytest.raises(InputError, match="dense: got 32 bytes"):
            client.predict(torch.zeros(2, 4), kjt)

    reply = torchserve.predict(model, codec.encode_lookup_request(bad_id), OCTETS, X_Recinfer_Method="lookup")
    assert reply.code == 400
    assert json.loads(reply.body)["message"] == str(expected.value)
    for body, content_type, headers, code, words in (
        (b"\xff\xff", OCTETS, {}, 400, "not a recinfer.v1.PredictRequest"),
        (b"{broken", JSON, {}, 400, "body: got text that is not JSON"),
        (b"[1, 2]", JSON, {}, 400, "list"),
        (b'{"features": {"user": "x"}}', JSON, {}, 400, "features['user']"),
        (b"{}", JSON, {"X_Recinfer_Method": "delete"}, 400, "'delete'"),
        (codec.encode_predict_request(dense, kjt, model="huge"), OCTETS, {}, 404, "'huge'"),
    ):
        reply = torchserve.predict(model, body, content_type, **headers)
        assert reply.code == code, reply
        assert words in json.loads(reply.body)["message"]


def test_one_bad_request_in_a_batch_fails_alone(torchserve: TorchServe, ours: InferenceClient):
    dense, kjt = make_request(2, 2)
    wide = torch.zeros(2, 4)
    with over_grpc(torchserve, "batched") as client, ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(client.predict, dense, kjt), pool.submit(client.predict, wide, kjt)
        for name, tensor in ours.predict(dense, kjt).items():
            torch.testing.assert_close(good.result()[name], tensor, **TOLERANCE)
        with pytest.raises(InputError, match="dense: got 32 bytes"):
            bad.result()
    bodies = [codec.encode_predict_request(dense, kjt), codec.encode_predict_request(wide, kjt)]
    for _ in range(20):  # until both came within the batch's two seconds: alone, a refusal has TorchServe's own form
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(lambda body: torchserve.predict("batched", body, OCTETS), bodies))
        assert [reply.code for reply in replies] == [200, 400]
        if "error" in json.loads(replies[1].body):
            break
    assert json.loads(replies[1].body)["error"]["code"] == "INVALID_ARGUMENT"


def test_an_answer_too_long_for_torchserve_costs_no_worker(torchserve: TorchServe):
    started = torchserve.output().count("Torch worker started")
    # As text, 16,384 samples take some 10 MB: TorchServe's own limit is 6.5 MB, and passing it kills the worker.
    one_id = {"features": {feature: [1] * 16_384 for feature in ROWS}}
    reply = torchserve.predict("tiny", json.dumps(one_id).encode(), JSON, X_Recinfer_Method="lookup")
    assert reply.code == 400
    assert "send fewer samples" in json.loads(reply.body)["message"]
    # As bytes, 4,000 samples take 512 kB; this entry is packed for 600 kB a batch of two.
    with over_grpc(torchserve, "batched") as client:
        with pytest.raises(InputError, match=r"may take 512000 bytes.*send fewer samples"):
            client.lookup(make_request(0, 4000)[1])
        assert client.lookup(make_request(0, 3)[1]).pooled is not None
    assert torchserve.predict("tiny", b'{"features": {"user": [1]}}', JSON, X_Recinfer_Method="lookup").code == 200
    assert torchserve.output().count("Torch worker started") == started


def test_nothing_is_answered_without_a_token(torchserve: TorchServe):
    dense, kjt = make_request(0, 1)
    url = f"{torchserve.rest}/predictions/tiny"
    body = codec.encode_predict_request(dense, kjt)
    assert torchserve.post(url, body).code == 400
    assert torchserve.post(url, body, key=torchserve.management_key).code == 400
    assert torchserve.post(f"{torchserve.management}/models?url=tiny", key=torchserve.inference_key).code == 400
    for token in ("", "wrong"):
        with over_grpc(torchserve, "tiny", token) as client, pytest.raises(RecinferError, match="Token"):
            client.predict(dense, kjt)


def test_tokens_last_as_long_as_the_config_says(torchserve: TorchServe):
    keys = torchserve.folder / "key_file.json"
    ends = datetime.fromisoformat(json.loads(keys.read_text())["inference"]["expiration time"][:19] + "+00:00")
    assert round((ends - datetime.fromtimestamp(keys.stat().st_mtime, UTC)) / timedelta(hours=1)) == 10


def test_unknown_model(torchserve: TorchServe):
    with over_grpc(torchserve, "nobody") as client, pytest.raises(RecinferError, match="nobody"):
        client.lookup(make_request(0, 1)[1])


def test_the_archive_stays_where_it_is(torchserve: TorchServe):
    unpacked = [path for path in (torchserve.folder / "temp").rglob("*") if path.is_file()]
    assert unpacked
    assert not [path for path in unpacked if path.suffix in (".safetensors", ".onnx", ".pt2")]


def test_versions_side_by_side(torchserve: TorchServe, tmp_path: Path):
    """A second version of a model is another entry, registered under the model's name."""
    entry = pack(build_archive(tmp_path, version="4"), torchserve.model_store, model_name="tiny-4")
    reply = torchserve.register(f"{entry.name}&model_name=tiny")
    assert reply.code == 200, reply
    dense, kjt = make_request(3, 2)
    body = codec.encode_predict_request(dense, kjt)
    for path, version in (("tiny", "3"), ("tiny/3", "3"), ("tiny/4", "4")):
        reply = torchserve.predict(path, body, OCTETS)
        assert codec.decode_predict_response(reply.body)[1] == version, reply
    for version in ("", "3", "4"):
        with TorchServeClient(
            torchserve.grpc_target, "tiny", token=torchserve.inference_key, version=version, timeout=120
        ) as client:
            assert client.lookup(kjt).model_version == (version or "3")
    default = f"{torchserve.management}/models/tiny/4/set-default"
    assert torchserve.post(default, key=torchserve.management_key, method="PUT").code == 200
    assert codec.decode_predict_response(torchserve.predict("tiny", body, OCTETS).body)[1] == "4"
    back = f"{torchserve.management}/models/tiny/3/set-default"
    assert torchserve.post(back, key=torchserve.management_key, method="PUT").code == 200
    gone = torchserve.post(f"{torchserve.management}/models/tiny/4", key=torchserve.management_key, method="DELETE")
    assert gone.code == 200
    assert torchserve.predict("tiny/4", body, OCTETS).code == 404
    assert torchserve.predict("tiny", body, OCTETS).code == 200


def test_the_management_calls_of_the_docs(torchserve: TorchServe):
    base, key = torchserve.management, torchserve.management_key
    listed = torchserve.post(f"{base}/models", key=key, method="GET")
    assert {model["modelName"] for model in json.loads(listed.body)["models"]} >= {"tiny", "zipped", "batched"}
    described = json.loads(torchserve.post(f"{base}/models/tiny", key=key, method="GET").body)[0]
    assert (described["modelVersion"], described["minWorkers"]) == ("3", 1)
    scaled = torchserve.post(f"{base}/models/tiny?min_worker=1&synchronous=true", key=key, method="PUT", timeout=300)
    assert scaled.code == 200, scaled
    keys = json.loads((torchserve.folder / "key_file.json").read_text())
    assert set(keys) == {"management", "inference", "API"}
    made = torchserve.post(f"{base}/token?type=inference", key=keys["API"]["key"], method="GET")
    assert made.code == 200, made
    keys = json.loads((torchserve.folder / "key_file.json").read_text())
    assert keys["inference"]["key"] != torchserve.inference_key
    torchserve.inference_key = keys["inference"]["key"]  # the old one is void
    dense, kjt = make_request(0, 1)
    assert torchserve.predict("tiny", codec.encode_predict_request(dense, kjt), OCTETS).code == 200
