"""Between the wire (proto/recinfer/v1) and arrays: decoding validates and is a view, encoding copies once.

Shapes: F features, B samples, N ids, D embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.columns import Strings
from recinfer.errors import InputError
from recinfer.inference.bags import Bags, offsets_of, with_strings
from recinfer.inference.results import Outputs
from recinfer.serving.wire.arrays import (
    Buffer,
    M,
    array_of,
    bytes_field,
    decode_lookup,
    decode_predict,
    encode_lookup_request,
    encode_predict_request,
    lookup_head,
    output_head,
    parse,
    predict_head,
    tensor_bytes,
)
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedTensor

__all__ = [
    "DTYPES",
    "M",
    "decode_bags",
    "decode_dense",
    "decode_inputs",
    "decode_lookup_response",
    "decode_predict_response",
    "encode_lookup_request",
    "encode_lookup_response",
    "encode_predict_request",
    "encode_predict_response",
    "parse",
]

_INT32, _INT64, _FLOAT32, _UINT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4"), np.dtype("<u4")


def decode_bags(
    message: pb.JaggedFeatures, limits: Limits, *, field: str = "features", may_be_none: bool = False
) -> Bags:
    """The ids of a request, as arrays over the message's own bytes.

    Args:
        may_be_none: allow a message without keys, for a model whose requests have no features.

    Returns:
        F keys and B samples; values ``[N]`` int64 or int32 (as sent), weights ``[N]`` float32 or None. The predictor
        checks the values themselves (ids, names, finite weights).

    Raises:
        InputError: a field that does not fit the others or a limit; the message names the field, got and expected.
    """
    keys = () if may_be_none and not message.keys else _decode_keys(message.keys, limits, field)
    batch = message.batch_size
    if not 1 <= batch <= limits.max_batch:
        todo = ": send fewer samples per request" if batch > limits.max_batch else ""
        raise InputError(f"{field}.batch_size: got {batch}, expected 1 to {limits.max_batch}{todo}")
    lengths = array_of(f"{field}.lengths", message.lengths, _INT32, len(keys) * batch, "keys x batch_size")
    # One pass: read as unsigned, a negative length is 2^31 or more, so no length is negative where the sum is within the limit.
    offsets = offsets_of(lengths.view(_UINT32), np.int64)
    num_ids = int(offsets[-1])
    if num_ids > limits.max_ids:
        _refuse_lengths(lengths, num_ids, keys, batch, limits, field)
    strings = None
    if string_keys := tuple(message.string_keys):
        values, strings = _decode_strings(message, string_keys, keys, lengths, field)
    else:
        values = _decode_values(message, num_ids, field)
    if values.dtype == _INT32:
        offsets = offsets.astype(np.int32)
    weights = None if num_ids else _NO_WEIGHTS  # without ids, empty and absent weights look alike
    if weighted := tuple(message.weighted_keys):
        weights = _spread_weights(message.weights, weighted, keys, offsets[::batch], field)
    elif raw := message.weights:
        weights = array_of(f"{field}.weights", raw, _FLOAT32, num_ids, f"one an id, as {field}.lengths says")
    return Bags(keys, batch, offsets, values, weights, weighted, strings)


def _decode_strings(
    message: pb.JaggedFeatures, string_keys: tuple[str, ...], keys: tuple[str, ...], lengths: NDArray[Any], field: str
) -> tuple[NDArray[np.int64], Strings]:
    """The ids of all features, 0 for each string, and the strings; see :class:`recinfer.inference.bags.Bags`."""
    if len(set(string_keys)) != len(string_keys) or not set(string_keys) <= set(keys):
        strange = next(key for key in string_keys if key not in keys or string_keys.count(key) > 1)
        raise InputError(f"{field}.string_keys: got {strange!r}, expected some of {field}.keys, each once")
    in_order = tuple(key for key in keys if key in string_keys)
    counts = lengths.reshape(len(keys), -1).sum(axis=1, dtype=np.int64)
    number = int(counts[[key in string_keys for key in keys]].sum())
    why = f"one a string, as {field}.lengths says"
    sizes = array_of(f"{field}.string_lengths", message.string_lengths, _INT32, number, why)
    data = message.strings
    if (sizes.size and sizes.min() < 0) or int(sizes.sum(dtype=np.int64)) != len(data):
        raise InputError(
            f"{field}.string_lengths: got lengths of {int(sizes.sum(dtype=np.int64))} bytes in all, the least {sizes.min(initial=0)}; "
            f"expected 0 or more each, and {len(data)} in all, the bytes of {field}.strings"
        )
    values = _decode_values(message, int(counts.sum()) - number, field)
    strings = Strings(in_order, data, sizes)
    return with_strings(keys, message.batch_size, lengths, values, strings), strings


def _spread_weights(
    raw: bytes, weighted: Sequence[str], keys: Sequence[str], edges: NDArray[Any], field: str
) -> NDArray[np.float32]:
    """Expand the weights of some features to one weight per id; the other ids weigh 1.

    ``edges``, ``[F + 1]``: the position of each key's first id, then the number of ids.
    """
    if strange := [key for key in weighted if key not in keys] or [key for key in weighted if weighted.count(key) > 1]:
        raise InputError(f"{field}.weighted_keys: got {strange[0]!r}, expected some of {field}.keys, each once")
    given = np.repeat([key in weighted for key in keys], np.diff(edges))
    why = f"one an id of {field}.weighted_keys"
    found = np.ones(given.size, np.float32)
    found[given] = array_of(f"{field}.weights", raw, _FLOAT32, int(given.sum()), why)
    return found


_NO_WEIGHTS = np.zeros(0, np.float32)


def _decode_keys(raw: Sequence[str], limits: Limits, field: str) -> tuple[str, ...]:
    if not raw:
        raise InputError(f"{field}.keys: got none, expected at least one feature name; ids are features, not inputs")
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
    raise InputError(
        f"{field}.lengths: got {num_ids} ids in all, expected at most {limits.max_ids}: send fewer samples per request"
    )


def _decode_values(message: pb.JaggedFeatures, num_ids: int, field: str) -> NDArray[Any]:
    values, values_int32 = message.values, message.values_int32
    if values and values_int32:
        raise InputError(f"{field}.values: got both values and values_int32, expected one of them")
    why = f"the sum of {field}.lengths"
    if values_int32:
        return array_of(f"{field}.values_int32", values_int32, _INT32, num_ids, why)
    return array_of(f"{field}.values", values, _INT64, num_ids, why)


def decode_dense(raw: bytes, batch: int, num_dense: int) -> Tensor:
    """``[B, num_dense]`` float32 over ``raw``; the predictor checks that the numbers are finite.

    Raises:
        InputError: ``raw`` holds another number of bytes.
    """
    if not raw and batch * num_dense:
        raise InputError(f"dense: got none, expected float32 [{batch}, {num_dense}]")
    values = array_of("dense", raw, _FLOAT32, batch * num_dense, f"batch_size {batch} x num_dense {num_dense}")
    return torch.from_numpy(values).view(batch, num_dense)


DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the bits, as numpy lacks the type
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("u1"),
}
"""The dtype of each input's bytes, by its name in archives and messages."""
_MAX_RANK, _MAX_SIZE = 8, (1 << 31) - 1


def decode_inputs(items: Iterable[pb.NamedInput], batch: int, limits: Limits) -> dict[str, Tensor | JaggedTensor]:
    """The named inputs of a request of ``batch`` samples, as tensors over the message's own bytes.

    The predictor checks names, dtypes, shapes and values against the model.

    Raises:
        InputError: too many inputs or values, a name that is there twice, or parts of an input that do not fit each other;
            the message names the input.
    """
    found: dict[str, Tensor | JaggedTensor] = {}
    values = 0
    for item in items:
        if item.name in found:
            raise InputError(f"inputs: got {item.name!r} more than once, expected each input once")
        if len(found) == limits.max_keys:
            raise InputError(f"inputs: got more than {limits.max_keys}, expected at most {limits.max_keys}")
        tensor = _decode_values_of(item)
        found[item.name] = _decode_jagged(item, tensor, batch) if item.lengths or item.weights else tensor
        if item.lengths:
            values += tensor.shape[0]
        if values > limits.max_ids:
            raise InputError(
                f"input {item.name!r}: got {values} values in all jagged inputs, expected at most {limits.max_ids}: send "
                "fewer samples per request"
            )
    return found


def _decode_values_of(item: pb.NamedInput) -> Tensor:
    where, shape = f"input {item.name!r}", tuple(item.shape)
    dtype = DTYPES.get(item.dtype)
    if dtype is None:
        raise InputError(f"{where}: got dtype {item.dtype[:40]!r}, expected one of {', '.join(DTYPES)}")
    sizes_fit = len(shape) <= _MAX_RANK and all(0 <= size <= _MAX_SIZE for size in shape)
    # With one size 0 the others may be anything, and torch counts the steps between rows in 63 bits.
    if not sizes_fit or math.prod(max(size, 1) for size in shape) > _MAX_SIZE:
        raise InputError(f"{where}: got shape {list(shape)[:9]}, expected at most {_MAX_RANK} sizes and 2^31 elements")
    array = array_of(f"{where}: values", item.values, dtype, math.prod(shape), f"shape {list(shape)}")
    if item.dtype == "bool":
        if array.size and array.max() > 1:
            at = int(np.argmax(array > 1))
            raise InputError(f"{where}: got the byte {array[at]} at position {at} of bool values, expected 0 or 1")
        array = array.view(np.bool_)
    tensor = torch.from_numpy(array)
    return (tensor.view(torch.bfloat16) if item.dtype == "bfloat16" else tensor).view(shape)


def _decode_jagged(item: pb.NamedInput, values: Tensor, batch: int) -> JaggedTensor:
    where = f"input {item.name!r}"
    if not values.dim() or not item.lengths:
        what = "weights without lengths" if values.dim() else "a shape without sizes and lengths"
        raise InputError(f"{where}: got {what}, expected values [values of all samples, ...] and their lengths")
    lengths = array_of(f"{where}: lengths", item.lengths, _INT32, batch, "batch_size")
    weights = None
    if item.weights:
        given = array_of(f"{where}: weights", item.weights, _FLOAT32, values.shape[0], "one a value")
        weights = torch.from_numpy(given)
    return JaggedTensor.from_parts_unchecked(values, weights, torch.from_numpy(lengths))


# -- answers that the server encodes -----------------------------------------------------------------------------


def encode_lookup_response(
    pooled: KeyedTensor | None,
    sequences: dict[str, JaggedTensor],
    batch: int,
    version: str,
    missing: tuple[int, ...] = (),
) -> bytes:
    """A serialized LookupResponse of pooled embeddings ``[B, sum(D)]`` and unpooled ones ``{feature: [n, D]}``.

    ``missing``: ranks whose rows are zero in the response.
    """
    parts: list[Buffer] = []
    if pooled is None:
        parts.append(lookup_head((), (), batch, version, missing))
    else:
        # The head is equal for most answers of a model, so it is cached; its dims and names are a third of a small answer.
        head = lookup_head(tuple(pooled.keys()), tuple(pooled.length_per_key()), batch, version, missing)
        parts += [head, *bytes_field(4, tensor_bytes(pooled.values(), _FLOAT32))]
    for key, sequence in sequences.items():
        values = sequence.values()
        small = pb.SequenceOutput(key=key, dim=values.shape[1], lengths=bytes(tensor_bytes(sequence.lengths(), _INT32)))
        parts += bytes_field(6, small.SerializeToString(), *bytes_field(4, tensor_bytes(values, _FLOAT32)))
    return b"".join(parts)


def encode_predict_response(outputs: dict[str, Tensor], version: str, missing: tuple[int, ...] = ()) -> bytes:
    """A serialized PredictResponse of float32 tensors by name; ``missing``: ranks whose rows were zero."""
    parts: list[Buffer] = [predict_head(version, missing)]
    for name, tensor in outputs.items():
        parts += output_head(name, tuple(tensor.shape)), tensor_bytes(tensor, _FLOAT32)
    return b"".join(parts)


# -- answers that a client in a process with torch decodes ---------------------------------------------------------


def decode_lookup_response(data: bytes) -> tuple[KeyedTensor | None, dict[str, JaggedTensor], str, tuple[int, ...]]:
    """Pooled and unpooled embeddings, the version, and the ranks that did not answer, out of a LookupResponse."""
    found = decode_lookup(data)
    pooled = None
    if found.dims:
        pooled = KeyedTensor(list(found.keys), list(found.dims), torch.from_numpy(found.values))
    sequences = {
        key: JaggedTensor(torch.from_numpy(vectors), lengths=torch.from_numpy(lengths))
        for key, (lengths, vectors) in found.sequences.items()
    }
    return pooled, sequences, found.version, found.missing


def decode_predict_response(data: bytes) -> tuple[Outputs, str]:
    """The output tensors by name and the model's version, out of a serialized PredictResponse."""
    arrays, version, missing = decode_predict(data)
    return Outputs({name: torch.from_numpy(array) for name, array in arrays.items()}, missing=missing), version
