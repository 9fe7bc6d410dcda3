"""Between the wire (proto/recinfer/v1) and arrays: decoding validates and is a view, encoding copies once.

Shapes: F features, B samples, N ids, D embedding width.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray
from torch import Tensor

from recinfer.errors import InputError
from recinfer.inference.bags import Bags, offsets_of
from recinfer.inference.results import Outputs
from recinfer.serving.wire.fields import Buffer, bytes_field, tensor_bytes
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.status import Status, error_of, status_of
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "Status",
    "decode_bags",
    "decode_dense",
    "decode_features",
    "decode_lookup_answer",
    "decode_lookup_response",
    "decode_predict_response",
    "encode_lookup_request",
    "encode_lookup_response",
    "encode_output_arrays",
    "encode_predict_request",
    "encode_predict_response",
    "error_of",
    "lookup_head",
    "parse",
    "status_of",
]

_INT32, _INT64, _FLOAT32, _UINT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4"), np.dtype("<u4")
_TORCH = {_INT32: torch.int32, _INT64: torch.int64, _FLOAT32: torch.float32}
assert sys.byteorder == "little", "the wire is little-endian and read in place; this machine is big-endian"

# torch warns, once a process, that a tensor over ``bytes`` must not be written. Nothing here or behind it writes to
# one: get that one warning over with where nobody sees it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """The message in ``data``.

    Raises:
        InputError: the bytes are no message of that kind.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InputError(f"request: {len(data)} bytes are not a {kind.DESCRIPTOR.full_name} message") from None


def _array(field: str, data: bytes, dtype: np.dtype, expected: int | None, why: str) -> NDArray[Any]:
    """``data`` as a 1-D array that shares its memory; checks that it holds ``expected`` elements."""
    size = dtype.itemsize
    if len(data) % size:
        raise InputError(
            f"{field}: got {len(data)} bytes, expected a multiple of {size} (little-endian {_name(dtype)})"
        )
    if expected is not None and len(data) != expected * size:
        raise InputError(
            f"{field}: got {len(data)} bytes ({len(data) // size} {_name(dtype)}), "
            f"expected {expected * size} bytes ({expected} {_name(dtype)}: {why})"
        )
    return np.frombuffer(data, dtype)


def _view(field: str, data: bytes, dtype: np.dtype, expected: int | None, why: str) -> Tensor:
    """:func:`_array` as a tensor."""
    if not len(_array(field, data, dtype, expected, why)):
        return torch.empty(0, dtype=_TORCH[dtype])
    return torch.frombuffer(data, dtype=_TORCH[dtype])


def _name(dtype: np.dtype) -> str:
    return dtype.name


def decode_features(message: pb.JaggedFeatures, limits: Limits, *, field: str = "features") -> KeyedJaggedTensor:
    """:func:`decode_bags` as a KeyedJaggedTensor; without ids its weights are empty, not None.

    Raises:
        InputError: as decode_bags.
    """
    bags = decode_bags(message, limits, field=field)
    values = message.values_int32 if bags.values.dtype == _INT32 else message.values
    dtype = _INT32 if bags.values.dtype == _INT32 else _INT64
    weights = None if bags.weights is None else _view(f"{field}.weights", message.weights, _FLOAT32, None, "")
    return KeyedJaggedTensor.from_parts_unchecked(
        list(bags.keys),
        _view(f"{field}.values", values, dtype, None, ""),
        _view(f"{field}.lengths", message.lengths, _INT32, None, ""),
        weights=weights,
        stride=bags.batch,
    )


def decode_bags(message: pb.JaggedFeatures, limits: Limits, *, field: str = "features") -> Bags:
    """The ids of a request, as arrays over the message's own bytes.

    Returns:
        F keys and B samples; values ``[N]`` int64 or int32 (as sent), weights ``[N]`` float32 or None. What the values
        say (ids, names, finite weights) is the predictor's check.

    Raises:
        InputError: a field that does not fit the others or a limit; the message names the field, got and expected.
    """
    keys = _decode_keys(message.keys, limits, field)
    batch = message.batch_size
    if not 1 <= batch <= limits.max_batch:
        raise InputError(f"{field}.batch_size: got {batch}, expected 1 to {limits.max_batch}")
    lengths = _array(f"{field}.lengths", message.lengths, _INT32, len(keys) * batch, "keys x batch_size")
    # One pass: read as unsigned, a negative length is 2^31 or more, so a sum within the limit has none.
    offsets = offsets_of(lengths.view(_UINT32), np.int64)
    num_ids = int(offsets[-1])
    if num_ids > limits.max_ids:
        _refuse_lengths(lengths, num_ids, keys, batch, limits, field)
    values = _decode_values(message, num_ids, field)
    if values.dtype == _INT32:
        offsets = offsets.astype(np.int32)
    weights = None if num_ids else _NO_WEIGHTS  # without ids, weights that are none and weights left out look alike
    if raw := message.weights:
        weights = _array(f"{field}.weights", raw, _FLOAT32, num_ids, f"one an id, as {field}.lengths says")
    return Bags(keys, batch, offsets, values, weights)


_NO_WEIGHTS = np.zeros(0, np.float32)


def _decode_keys(raw: Sequence[str], limits: Limits, field: str) -> tuple[str, ...]:
    if not raw:
        raise InputError(f"{field}.keys: got none, expected at least one feature name")
    if len(raw) > limits.max_keys:
        raise InputError(f"{field}.keys: got {len(raw)}, expected at most {limits.max_keys}")
    keys = tuple(raw)
    if len(set(keys)) != len(keys):
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise InputError(f"{field}.keys: got {twice!r} more than once, expected each feature once")
    return keys


def _refuse_lengths(
    lengths: NDArray[Any], num_ids: int, keys: Sequence[str], batch: int, limits: Limits, field: str
) -> None:
    if lengths.min() < 0:
        at = int(np.argmax(lengths < 0))
        raise InputError(
            f"{field}.lengths: got {lengths[at]} for feature {keys[at // batch]!r}, sample {at % batch}; "
            "expected 0 or more"
        )
    raise InputError(f"{field}.lengths: got {num_ids} ids in all, expected at most {limits.max_ids}")


def _decode_values(message: pb.JaggedFeatures, num_ids: int, field: str) -> NDArray[Any]:
    values, values_int32 = message.values, message.values_int32
    if values and values_int32:
        raise InputError(f"{field}.values: got both values and values_int32, expected one of them")
    why = f"the sum of {field}.lengths"
    if values_int32:
        return _array(f"{field}.values_int32", values_int32, _INT32, num_ids, why)
    return _array(f"{field}.values", values, _INT64, num_ids, why)


def decode_dense(raw: bytes, batch: int, num_dense: int) -> Tensor:
    """``[B, num_dense]`` float32 over ``raw``; that they are finite is the predictor's check.

    Raises:
        InputError: another number of bytes.
    """
    why = f"batch_size {batch} x num_dense {num_dense}"
    return _view("dense", raw, _FLOAT32, batch * num_dense, why).view(batch, num_dense)


# -- answers: what the server sends ------------------------------------------------------------------------------


def encode_lookup_response(
    pooled: KeyedTensor | None,
    sequences: dict[str, JaggedTensor],
    batch: int,
    version: str,
    missing: tuple[int, ...] = (),
) -> bytes:
    """A serialized LookupResponse of pooled embeddings ``[B, sum(D)]`` and unpooled ones ``{feature: [n, D]}``.

    ``missing``: ranks whose rows are zero in it.
    """
    parts: list[Buffer] = []
    if pooled is None:
        parts.append(lookup_head((), (), batch, version, missing))
    else:
        # Equal for most answers of a model, so written once; the dims and names alone are a third of a small answer.
        head = lookup_head(tuple(pooled.keys()), tuple(pooled.length_per_key()), batch, version, missing)
        parts += [head, *bytes_field(4, tensor_bytes(pooled.values(), _FLOAT32))]
    for key, sequence in sequences.items():
        values = sequence.values()
        small = pb.SequenceOutput(key=key, dim=values.shape[1], lengths=bytes(tensor_bytes(sequence.lengths(), _INT32)))
        parts += bytes_field(6, small.SerializeToString(), *bytes_field(4, tensor_bytes(values, _FLOAT32)))
    return b"".join(parts)


@lru_cache(maxsize=256)
def lookup_head(
    keys: tuple[str, ...], dims: tuple[int, ...], batch: int, version: str, missing: tuple[int, ...]
) -> bytes:
    """A serialized LookupResponse without its embeddings."""
    return pb.LookupResponse(
        keys=keys, dims=dims, batch_size=batch, model_version=version, missing_ranks=missing
    ).SerializeToString()


@lru_cache(maxsize=256)
def _tensor_head(name: str, shape: tuple[int, ...]) -> bytes:
    return pb.NamedTensor(name=name, shape=shape).SerializeToString()


@lru_cache(maxsize=64)
def _predict_head(version: str, missing: tuple[int, ...]) -> bytes:
    return pb.PredictResponse(model_version=version, missing_ranks=missing).SerializeToString()


def encode_predict_response(outputs: dict[str, Tensor], version: str, missing: tuple[int, ...] = ()) -> bytes:
    """A serialized PredictResponse of float32 tensors by name; ``missing``: ranks whose rows were zero."""
    parts: list[Buffer] = [_predict_head(version, missing)]
    for name, tensor in outputs.items():
        small = _tensor_head(name, tuple(tensor.shape))
        parts += bytes_field(1, small, *bytes_field(3, tensor_bytes(tensor, _FLOAT32)))
    return b"".join(parts)


def encode_output_arrays(
    names: Sequence[str], arrays: Sequence[NDArray[Any]], version: str, missing: tuple[int, ...] = ()
) -> bytes:
    """:func:`encode_predict_response` of float32 arrays, C-contiguous."""
    parts: list[Buffer] = [_predict_head(version, missing)]
    for name, array in zip(names, arrays):
        small = _tensor_head(name, array.shape)
        parts += bytes_field(1, small, *bytes_field(3, array.tobytes()))
    return b"".join(parts)


# -- requests and answers: the client's side ---------------------------------------------------------------------


def _encode_features(features: KeyedJaggedTensor, number: int = 3) -> list[Buffer]:
    if features.variable_stride_per_key():
        raise InputError("features: got another batch size for each key, expected one batch size for all")
    values, weights = features.values(), features.weights_or_none()
    if values.dtype not in (torch.int32, torch.int64):
        raise InputError(f"features.values: got {values.dtype}, expected torch.int64 or torch.int32")
    try:
        small = pb.JaggedFeatures(keys=features.keys(), batch_size=features.stride()).SerializeToString()
    except (TypeError, UnicodeEncodeError):
        raise InputError(f"features: got names {str(features.keys())[:80]}, expected each to be text") from None
    parts: list[Buffer] = [small, *bytes_field(3, tensor_bytes(features.lengths(), _INT32))]
    wide = values.dtype == torch.int64
    parts += bytes_field(4 if wide else 6, tensor_bytes(values, _INT64 if wide else _INT32))
    if weights is not None:
        parts += bytes_field(5, tensor_bytes(weights, _FLOAT32))
    return bytes_field(number, *parts)


def encode_lookup_request(features: KeyedJaggedTensor, model: str = "", version: str = "") -> bytes:
    """A serialized LookupRequest.

    Raises:
        InputError: ids that are not int32 or int64, or a batch size that varies by key.
    """
    return b"".join([pb.LookupRequest(model=model, version=version).SerializeToString(), *_encode_features(features)])


def encode_predict_request(
    dense: Tensor,
    features: KeyedJaggedTensor,
    model: str = "",
    version: str = "",
    *,
    context: KeyedJaggedTensor | None = None,
) -> bytes:
    """A serialized PredictRequest from ``dense [B, num_dense]`` and the features of the same B samples.

    ``context``: features of one sample that go with all B, none of them in ``features``.

    Raises:
        InputError: as encode_lookup_request, or ``dense`` is not a float matrix of the batch size.
    """
    if dense.dim() != 2 or dense.shape[0] != features.stride() or not dense.is_floating_point():
        raise InputError(
            f"dense: got {dense.dtype} of shape {list(dense.shape)}, "
            f"expected float32 [{features.stride()} (the batch size), num_dense]"
        )
    head = pb.PredictRequest(model=model, version=version).SerializeToString()
    parts = [head, *_encode_features(features), *bytes_field(4, tensor_bytes(dense, _FLOAT32))]
    return b"".join(parts if context is None else [*parts, *_encode_features(context, 5)])


def decode_lookup_response(data: bytes) -> tuple[KeyedTensor | None, dict[str, JaggedTensor], str]:
    """Pooled embeddings, unpooled ones and the model's version, out of a serialized LookupResponse."""
    return decode_lookup_answer(data)[:3]


def decode_lookup_answer(data: bytes) -> tuple[KeyedTensor | None, dict[str, JaggedTensor], str, tuple[int, ...]]:
    """:func:`decode_lookup_response`, and the ranks whose rows are zero in it because they did not answer."""
    message = parse(pb.LookupResponse, data)
    batch, dims = message.batch_size, list(message.dims)
    pooled = None
    if dims:
        values = _view("values", message.values, _FLOAT32, batch * sum(dims), "batch_size x sum(dims)")
        pooled = KeyedTensor(list(message.keys), dims, values.view(batch, sum(dims)))
    sequences = {}
    for item in message.sequences:
        lengths = _view(f"sequences[{item.key!r}].lengths", item.lengths, _INT32, batch, "batch_size")
        values = _view(f"sequences[{item.key!r}].values", item.values, _FLOAT32, None, "")
        sequences[item.key] = JaggedTensor(values.view(-1, item.dim), lengths=lengths)
    return pooled, sequences, message.model_version, tuple(message.missing_ranks)


def decode_predict_response(data: bytes) -> tuple[Outputs, str]:
    """The output tensors by name and the model's version, out of a serialized PredictResponse."""
    message = parse(pb.PredictResponse, data)
    outputs = Outputs(missing=tuple(message.missing_ranks))
    for item in message.outputs:
        shape = list(item.shape)
        outputs[item.name] = _view(
            f"outputs[{item.name!r}]", item.values, _FLOAT32, int(np.prod(shape)), f"shape {shape}"
        ).view(shape)
    return outputs, message.model_version
