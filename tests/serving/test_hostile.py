"""Hundreds of malformed messages: each is refused with a code that blames the caller, and the server answers as before."""

from __future__ import annotations

import random

import grpc
import pytest
import torch

from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.proto import inference_pb2 as pb
from tests.serving.conftest import make_request

BLAME = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
KINDS = {"Lookup": pb.LookupRequest, "Predict": pb.PredictRequest, "GetModel": pb.GetModelRequest}


def mutations(seed: int) -> list[tuple[str, bytes]]:
    """Calls with bytes that are random, cut, flipped or repeated, or well-formed messages with inconsistent fields."""
    rng = random.Random(seed)
    dense, kjt = make_request(seed, 3)
    good = {"Lookup": codec.encode_lookup_request(kjt), "Predict": codec.encode_predict_request(dense, kjt)}
    calls = [(rng.choice(list(KINDS)), rng.randbytes(rng.randrange(1, 300))) for _ in range(20)]
    for call, data in good.items():
        for _ in range(10):
            calls.append((call, data[: rng.randrange(len(data))]))
            flipped = bytearray(data)
            for _ in range(rng.randrange(1, 6)):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            calls.append((call, bytes(flipped)))
        calls.append((call, data + data))
        calls += [(call, lie(KINDS[call].FromString(data), rng)) for _ in range(20)]
    return calls


def lie(message: pb.LookupRequest | pb.PredictRequest, rng: random.Random) -> bytes:
    """``message`` with one field that does not fit the others."""
    features = message.features
    number = rng.choice([-1, 0, 1, 2, 7, 2**31 - 1, -(2**31)])
    field = rng.choice(["keys", "batch_size", "lengths", "values", "weights", "values_int32", "model", "version"])
    if field == "keys":
        features.keys.extend(rng.choice([["user"], ["nobody"], ["\0"], ["x" * 10_000], ["é"] * 5000]))
    elif field == "batch_size":
        features.batch_size = number
    elif field == "lengths":
        lengths = torch.frombuffer(bytearray(features.lengths), dtype=torch.int32)
        lengths[rng.randrange(len(lengths))] = number
        features.lengths = lengths.numpy().tobytes()
    elif field in ("model", "version"):
        setattr(message, field, rng.choice(["nobody", "\0", "../../etc", "x" * 100_000]))
    elif field == "values" and features.values:
        ids = torch.frombuffer(bytearray(features.values), dtype=torch.int64)
        ids[rng.randrange(len(ids))] = rng.choice([-1, 2**62, -(2**63), 2**31, 50])
        features.values = ids.numpy().tobytes()
    else:
        setattr(features, field, rng.randbytes(rng.choice([1, 4, 8, 64, 4096])))
    return message.SerializeToString()


@pytest.mark.parametrize("seed", range(4))
def test_the_server_survives(server: Server, client: InferenceClient, predictor: Predictor, seed: int):
    calls = mutations(seed)
    refused = 0
    with grpc.insecure_channel(server.target) as channel:
        for call, data in calls:
            try:
                answer = channel.unary_unary(f"/{SERVICE_NAME}/{call}")(data, timeout=60)
            except grpc.RpcError as error:
                refused += 1
                assert error.code() in BLAME, (call, data, error.code(), error.details())
                assert len(error.details()) < 2000
                assert not any(word in error.details() for word in ("Traceback", ".py", "site-packages"))
            else:  # a flip may hit a harmless byte, such as a bit of a dense column: then the answer must be one
                {"Lookup": codec.decode_lookup_response, "Predict": codec.decode_predict_response}.get(
                    call, pb.ModelInfo.FromString
                )(answer)
    assert refused > len(calls) // 2
    dense, kjt = make_request(99, 5)
    assert torch.equal(client.lookup(kjt).pooled.values(), predictor.lookup(kjt).pooled.values())
    assert client.predict(dense, kjt).keys() == predictor.predict(dense, kjt).keys()
