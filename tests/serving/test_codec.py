"""The codec: round trips, and errors that name inconsistent fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.errors import InputError
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

LIMITS = Limits(max_batch=8, max_ids=100, max_keys=4)


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def i64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def good(**changes: object) -> pb.JaggedFeatures:
    """Two features, two samples, four ids; ``changes`` break it."""
    fields = {"keys": ["a", "b"], "batch_size": 2, "lengths": i32(1, 2, 0, 1), "values": i64(7, 8, 9, 10)}
    return pb.JaggedFeatures(**{**fields, **changes})


def test_field_numbers_are_the_wire_contract():
    numbers = {
        name: {field.name: field.number for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert numbers == {
        "JaggedFeatures": {
            "keys": 1, "batch_size": 2, "lengths": 3, "values": 4, "weights": 5, "values_int32": 6,
            "weighted_keys": 7, "string_keys": 8, "strings": 9, "string_lengths": 10,
        },
        "LookupRequest": {"model": 1, "version": 2, "features": 3, "label": 15},
        "LookupResponse": {
            "keys": 1, "dims": 2, "batch_size": 3, "values": 4, "model_version": 5, "sequences": 6,
            "missing_ranks": 7,
        },
        "SequenceOutput": {"key": 1, "dim": 2, "lengths": 3, "values": 4},
        "PredictRequest": {
                "model": 1, "version": 2, "features": 3, "dense": 4, "context": 5, "raw": 6, "inputs": 7,
                "context_inputs": 8, "raw_context": 9, "label": 15,
            },
            "NamedInput": {"name": 1, "dtype": 2, "shape": 3, "values": 4, "lengths": 5, "weights": 6},
        "NamedTensor": {"name": 1, "shape": 2, "values": 3},
        "PredictResponse": {"outputs": 1, "model_version": 2, "missing_ranks": 3},
        "GetModelRequest": {"model": 1, "version": 2, "label": 15},
        "FeatureInfo": {
                "name": 1, "table": 2, "rows": 3, "dim": 4, "pooled": 5, "missing": 6, "weighted": 7, "computed": 8,
            },
            "InputInfo": {
                "name": 1, "path": 2, "kind": 3, "dtype": 4, "shape": 5, "weighted": 6, "per_sample": 7, "as_long_as": 8,
                "user": 9, "counts": 10,
            },
        "ModelInfo": {
            "name": 1, "version": 2, "features": 3, "num_dense": 4, "precision": 5, "plan_hash": 6,
            "feature_contract": 7, "needs_weights": 8, "inputs": 9, "string_features": 10,
        },
    }  # fmt: skip
    assert pb.DESCRIPTOR.package == "recinfer.v1"


def test_decodes_ids_by_key_and_sample():
    kjt = codec.decode_bags(good(weights=f32(1, 2, 3, 4)), LIMITS).kjt()
    assert kjt.keys() == ["a", "b"]
    assert kjt.stride() == 2
    assert kjt["a"].to_dense()[0].tolist() == [7]
    assert kjt["a"].to_dense()[1].tolist() == [8, 9]
    assert kjt["b"].values().tolist() == [10]
    assert kjt["b"].weights().tolist() == [4.0]


def test_decoded_values_are_a_view_of_their_bytes():
    values = codec.decode_bags(good(), LIMITS).values
    assert isinstance(values.base, bytes) and not values.flags.owndata  # protobuf gives a field's bytes


def test_int32_values_stay_int32():
    kjt = codec.decode_bags(good(values=b"", values_int32=i32(7, 8, 9, 10)), LIMITS).kjt()
    assert kjt.values().dtype == torch.int32
    assert kjt.values().tolist() == [7, 8, 9, 10]


def test_all_bags_may_be_empty():
    kjt = codec.decode_bags(good(lengths=i32(0, 0, 0, 0), values=b""), LIMITS).kjt()
    assert kjt.values().shape == (0,)
    assert kjt.lengths().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": []}, ["features.keys", "none", "at least one"]),
        ({"keys": ["a", "a"]}, ["features.keys", "'a'", "once"]),
        ({"keys": list("abcde")}, ["features.keys", "5", "at most 4"]),
        ({"batch_size": 0}, ["features.batch_size", "0", "1 to 8"]),
        ({"batch_size": -3}, ["features.batch_size", "-3", "1 to 8"]),
        ({"batch_size": 9}, ["features.batch_size", "9", "1 to 8"]),
        ({"lengths": i32(1, 2, 0)}, ["features.lengths", "12 bytes", "16 bytes"]),
        ({"lengths": i32(1, 2, 0, 1)[:-1]}, ["features.lengths", "15 bytes", "multiple of 4"]),
        ({"lengths": i32(1, 2, -1, 2)}, ["features.lengths", "-1", "'b'", "sample 0", "0 or more"]),
        ({"lengths": i32(1, 2, 0, 2)}, ["features.values", "32 bytes", "40 bytes", "sum of features.lengths"]),
        ({"lengths": i32(2**31 - 1, 2**31 - 1, 0, 1)}, ["features.lengths", "4294967295 ids", "at most 100"]),
        ({"values": i64(7, 8, 9)}, ["features.values", "24 bytes", "32 bytes"]),
        ({"values": i64(7, 8, 9, 10)[:-3]}, ["features.values", "29 bytes", "multiple of 8"]),
        ({"values": b""}, ["features.values", "0 bytes", "32 bytes"]),
        ({"values_int32": i32(1, 2, 3, 4)}, ["features.values", "both", "one of them"]),
        ({"values": b"", "values_int32": i32(1)}, ["features.values_int32", "4 bytes", "16 bytes"]),
        ({"weights": f32(1)}, ["features.weights", "4 bytes", "16 bytes"]),
    ],
)
def test_refuses_by_name(change: dict[str, object], words: list[str]):
    with pytest.raises(InputError) as caught:
        codec.decode_bags(good(**change), LIMITS)
    for word in words:
        assert word in str(caught.value)


def test_dense_is_checked_by_bytes():
    assert codec.decode_dense(f32(1, 2, 3, 4), 2, 2).tolist() == [[1, 2], [3, 4]]
    assert codec.decode_dense(b"", 2, 0).shape == (2, 0)
    with pytest.raises(InputError, match=r"dense: got 12 bytes .* expected 16 bytes .*batch_size 2 x num_dense 2"):
        codec.decode_dense(f32(1, 2, 3), 2, 2)


def test_bytes_that_are_not_a_message_are_an_input_error():
    with pytest.raises(InputError, match=r"4 bytes are not a recinfer\.v1\.LookupRequest"):
        codec.parse(pb.LookupRequest, b"\xff\xff\xff\xff")


def test_client_refuses_what_the_wire_cannot_say():
    floats = KeyedJaggedTensor(["a"], torch.tensor([1.0]), lengths=torch.tensor([1]))
    with pytest.raises(InputError, match=r"features.values: got torch.float32"):
        codec.encode_lookup_request(floats)
    ids = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(InputError, match=r"dense: got .*expected float32"):
        codec.encode_predict_request(torch.zeros(3, 2), ids)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
    weighted=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_requests_round_trip(lengths: list[list[int]], weighted: bool, wide: bool, seed: int):
    random = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths, dtype=torch.int32).reshape(-1)
    total = int(counts.sum())
    ids = torch.randint(0, 2**31 - 1, (total,), generator=random, dtype=torch.int64 if wide else torch.int32)
    weights = torch.rand(total, generator=random) if weighted else None
    keys = [f"f{i}" for i in range(len(lengths))]
    sent = KeyedJaggedTensor(keys, ids, lengths=counts, weights=weights)
    dense = torch.rand(3, 2, generator=random)

    request = codec.parse(pb.PredictRequest, codec.encode_predict_request(dense, sent, "m", "v"))
    got = codec.decode_bags(request.features, Limits()).kjt()
    assert (request.model, request.version) == ("m", "v")
    assert got.keys() == keys
    assert torch.equal(got.values(), ids if total else got.values())
    assert torch.equal(got.lengths(), counts)
    assert torch.equal(codec.decode_dense(request.dense, 3, 2), dense)
    if weighted and total:
        assert torch.equal(got.weights(), weights)
    # The runtime's own serialization of the same message reads as the same message.
    assert pb.PredictRequest.FromString(request.SerializeToString()) == request


def test_responses_round_trip():
    pooled = KeyedTensor(["a", "b"], [2, 3], torch.rand(4, 5))
    sequences = {
        "s": JaggedTensor(torch.rand(3, 2), lengths=torch.tensor([1, 0, 2, 0])),
        "empty": JaggedTensor(torch.rand(0, 7), lengths=torch.zeros(4, dtype=torch.int64)),
    }
    data = codec.encode_lookup_response(pooled, sequences, 4, "v3")
    got, got_sequences, version, _ = codec.decode_lookup_response(data)
    assert version == "v3"
    assert got is not None and got.keys() == ["a", "b"]
    assert torch.equal(got.values(), pooled.values())
    assert list(got_sequences) == ["s", "empty"]
    for key, sequence in sequences.items():
        assert torch.equal(got_sequences[key].values(), sequence.values())
        assert got_sequences[key].lengths().tolist() == sequence.lengths().tolist()

    outputs = {"logits": torch.rand(4, 1), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}
    got_outputs, version = codec.decode_predict_response(codec.encode_predict_response(outputs, "v4"))
    assert version == "v4"
    assert {name: tensor.shape for name, tensor in got_outputs.items()} == {k: v.shape for k, v in outputs.items()}
    assert all(torch.equal(got_outputs[name], tensor) for name, tensor in outputs.items())


def test_encodes_arrays_that_are_not_contiguous_or_not_float32():
    tensor = torch.arange(6, dtype=torch.float64).view(2, 3).t()
    got, _ = codec.decode_predict_response(codec.encode_predict_response({"x": tensor}, ""))
    assert got["x"].dtype == torch.float32
    assert got["x"].tolist() == tensor.tolist()


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_give_a_message_or_an_input_error(data: bytes):
    try:
        codec.decode_bags(codec.parse(pb.JaggedFeatures, data), LIMITS)
    except InputError as error:
        assert str(error)


def test_a_context_with_numbers_may_have_strings_and_an_empty_history() -> None:
    context = {"history": [[]], "city": ["paris"], "age": [[0.5]]}
    sent = pb.PredictRequest.FromString(codec.encode_predict_request(None, {"item": [[1]]}, context=context))
    assert list(sent.context.keys) == ["history", "city"]
    assert list(sent.context.string_keys) == ["city"]
    assert [one.name for one in sent.context_inputs] == ["age"]
