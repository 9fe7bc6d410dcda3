"""Between the wire (proto/recinfer/v1) and numpy arrays, and protobuf fields joined from parts; needs no torch.

A serialized protobuf message is the concatenation of its fields in any order. The protobuf runtime copies a bytes field
three times on its way out and grows its buffer as it goes (13.6 MB: 17 to 45 ms; joined from parts: 2.4 ms), so the
codec lets the runtime write the small fields and appends the large ones here, as views.

Shapes: F features, B samples, N ids, D embedding width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays, as_features, as_matrix, of_context
from recinfer.errors import InputError
from recinfer.input_arrays import InputArrays, as_input, batch_of_inputs
from recinfer.serving.wire.proto import inference_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Buffer",
    "LookupArrays",
    "M",
    "array_bytes",
    "array_of",
    "bytes_field",
    "decode_lookup",
    "decode_predict",
    "encode_input",
    "encode_lookup_request",
    "encode_predict_request",
    "field_head",
    "lookup_head",
    "no_features",
    "output_head",
    "parse",
    "predict_head",
    "tensor_bytes",
    "varint",
]

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
assert sys.byteorder == "little", "the wire is little-endian and read in place; this machine is big-endian"

Buffer = bytes | memoryview
_LENGTH_DELIMITED = 2
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


def array_of(field: str, data: bytes, dtype: np.dtype, expected: int | None, why: str) -> NDArray[Any]:
    """``data`` as a 1-D array that shares its memory; checks that it holds ``expected`` elements."""
    size = dtype.itemsize
    if len(data) % size:
        raise InputError(f"{field}: got {len(data)} bytes, expected a multiple of {size} (little-endian {dtype.name})")
    if expected is not None and len(data) != expected * size:
        raise InputError(
            f"{field}: got {len(data)} bytes ({len(data) // size} {dtype.name}), "
            f"expected {expected * size} bytes ({expected} {dtype.name}: {why})"
        )
    return np.frombuffer(data, dtype)


# -- fields -----------------------------------------------------------------------------------------------------------


def bytes_field(number: int, *parts: Buffer) -> list[Buffer]:
    """Parts of a length-delimited field (bytes, string or message) that holds ``parts`` one behind another.

    >>> b"".join(bytes_field(3, b"ab", b"c"))
    b'\\x1a\\x03abc'
    """
    return [field_head(number, sum(len(part) for part in parts)), *parts]


def field_head(number: int, size: int) -> bytes:
    """The tag and the length before the ``size`` bytes of a length-delimited field."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(size)


def tensor_bytes(tensor: Tensor, dtype: np.dtype) -> memoryview:
    """``tensor`` as little-endian bytes of ``dtype``, row-major: a view where the tensor holds them in this form."""
    # A detach() or cpu() without effect costs as much as the copy of a small answer.
    if tensor.requires_grad or tensor.device.type != "cpu":
        tensor = tensor.detach().cpu()
    return array_bytes(tensor.numpy(), dtype)


def array_bytes(array: np.ndarray[Any, Any], dtype: np.dtype | None = None) -> memoryview:
    """:func:`tensor_bytes` of an array; ``dtype`` None: the array's own."""
    array = np.ascontiguousarray(array, dtype=dtype)
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def varint(value: int) -> bytes:
    """``value``, 0 or more, as a protobuf varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# -- requests ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _request_head(model: str, version: str, label: str) -> bytes:
    # All requests of recinfer have these fields with the same numbers.
    return pb.LookupRequest(model=model, version=version, label=label).SerializeToString()


@lru_cache(maxsize=256)
def _features_head(
    keys: tuple[str, ...], batch: int, weighted: tuple[str, ...], strings: tuple[str, ...] = ()
) -> bytes:
    try:
        return pb.JaggedFeatures(
            keys=keys, batch_size=batch, weighted_keys=weighted, string_keys=strings
        ).SerializeToString()
    except (TypeError, UnicodeEncodeError):
        raise InputError(f"features: got names {str(list(keys))[:80]}, expected each to be text") from None


def _encode_features(features: FeatureArrays, number: int = 3) -> list[Buffer]:
    values, weights, strings = features.values, features.weights, features.strings
    string_keys = () if strings is None else strings.keys
    parts: list[Buffer] = [_features_head(features.keys, features.batch, features.weighted, string_keys)]
    parts += bytes_field(3, array_bytes(features.lengths, _INT32))
    wide = values.dtype == np.int64
    parts += bytes_field(4 if wide else 6, array_bytes(values, _INT64 if wide else _INT32))
    if weights is not None:
        parts += bytes_field(5, array_bytes(weights, _FLOAT32))
    if strings is not None:
        parts += [*bytes_field(9, strings.data), *bytes_field(10, array_bytes(strings.lengths, _INT32))]
    return bytes_field(number, *parts)


def encode_lookup_request(features: Any, model: str = "", version: str = "", label: str = "") -> bytes:
    """A serialized LookupRequest of ``features``, see :func:`recinfer.columns.as_features`.

    Raises:
        InputError: values that are no features, ids that are not int32 or int64, or a batch size that varies by key.
    """
    return b"".join([_request_head(model, version, label), *_encode_features(as_features(features))])


def encode_predict_request(
    dense: Any,
    features: Any,
    model: str = "",
    version: str = "",
    *,
    label: str = "",
    context: Any = None,
    inputs: Mapping[str, Any] | None = None,
    context_inputs: Mapping[str, Any] | None = None,
) -> bytes:
    """A serialized PredictRequest from ``dense [B, num_dense]`` (None: no dense inputs) and the features of the same B samples.

    Args:
        features: None for a model whose requests have no features.
        context: features of one sample that go with all B, none of them in ``features``; a mapping may hold other inputs too.
        inputs: other inputs by name, see :func:`recinfer.input_arrays.as_input`.
        context_inputs: other inputs of one sample that go with all B.

    Raises:
        InputError: see encode_lookup_request; or ``dense`` is not a matrix of numbers of the batch size.
    """
    named, once = _named("inputs", inputs), _named("context_inputs", context_inputs)
    sparse = no_features(named) if named and _is_none(features) else as_features(features)
    parts = [_request_head(model, version, label), *_encode_features(sparse)]
    if dense is not None:
        matrix = as_matrix(dense)
        if matrix.shape[0] != sparse.batch:
            raise InputError(
                f"dense: got {matrix.dtype} of shape {list(matrix.shape)}, "
                f"expected float32 [{sparse.batch} (the batch size), num_dense]"
            )
        parts += bytes_field(4, array_bytes(matrix, _FLOAT32))
    if context is not None:
        shared, others = _split_context(context)
        once |= others
        parts += [] if shared is None else _encode_features(shared, 5)
    for name, given in named.items():
        parts += encode_input(name, given)
    for name, given in once.items():
        parts += encode_input(name, given, number=8)
    return b"".join(parts)


def _named(field: str, inputs: Any) -> dict[str, InputArrays]:
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(f"{field}: got a {type(inputs).__name__}, expected a mapping of input name to its values")
    return {name: as_input(name, data) for name, data in (inputs or {}).items()}


def _split_context(context: Any) -> tuple[FeatureArrays | None, dict[str, InputArrays]]:
    """The features of a context, and its inputs that hold no ids; the server finds inputs of whole numbers by their names."""
    with of_context():
        try:
            return as_features(context), {}
        except InputError:
            if not isinstance(context, Mapping):
                raise
            others = {name: as_input(name, data) for name, data in context.items() if not _may_be_ids(name, data)}
            if not others:
                raise
        rest = {name: data for name, data in context.items() if name not in others}
        return as_features(rest) if rest else None, others


def _may_be_ids(name: str, data: Any) -> bool:
    """Whether a column holds ids, strings or nothing: an empty history is a feature, too; text alone is one of no other input."""
    if isinstance(data, str | bytes):
        return True
    try:
        as_features({name: data})
    except InputError:
        return False
    return True


def _is_none(features: Any) -> bool:
    return features is None or (isinstance(features, Mapping) and not features)


def no_features(inputs: Mapping[str, InputArrays]) -> FeatureArrays:
    """No features, of as many samples as ``inputs`` have."""
    return FeatureArrays((), batch_of_inputs(inputs), np.zeros(0, np.int32), np.zeros(0, np.int64))


def encode_input(
    name: str, given: InputArrays, dtype: str | None = None, shape: Sequence[int] | None = None, number: int = 7
) -> list[Buffer]:
    """Parts of the field ``number`` of a PredictRequest, for one input: 7 ``inputs``, 8 ``context_inputs``.

    Args:
        dtype: the dtype of the values' bytes where numpy lacks it; None: that of the array.
        shape: of the values; None: that of the array.
    """
    values = given.values
    shape = values.shape if shape is None else shape
    try:
        head = pb.NamedInput(name=name, dtype=dtype or values.dtype.name, shape=shape).SerializeToString()
    except (TypeError, ValueError):  # also an encoding error, for a lone surrogate
        raise InputError(
            f"inputs: got name {name!r:.80} and shape {list(shape)[:9]}; expected text and sizes"
        ) from None
    parts: list[Buffer] = [head, *bytes_field(4, array_bytes(values, values.dtype.newbyteorder("<")))]
    if given.lengths is not None:
        parts += bytes_field(5, array_bytes(given.lengths, _INT32))
    if given.weights is not None:
        parts += bytes_field(6, array_bytes(given.weights, _FLOAT32))
    return bytes_field(number, *parts)


# -- answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookupArrays:
    """A LookupResponse: ``values`` float32 ``[B, sum(dims)]`` of the pooled ``keys``, and for each unpooled feature the lengths
    int32 ``[B]`` and the vectors float32 ``[n, D]``; ``missing``: ranks whose rows are zero, as they did not answer."""

    keys: tuple[str, ...]
    dims: tuple[int, ...]
    values: NDArray[np.float32]
    sequences: dict[str, tuple[NDArray[np.int32], NDArray[np.float32]]]
    version: str
    missing: tuple[int, ...]

    def pooled(self) -> dict[str, NDArray[np.float32]]:
        """``values`` by key, each ``[B, D]``."""
        blocks = np.split(self.values, np.cumsum(self.dims)[:-1], axis=1) if self.dims else []
        return dict(zip(self.keys, blocks))

    def bags(self) -> dict[str, list[NDArray[np.float32]]]:
        """``sequences`` by key: one array ``[n, D]`` per sample."""
        return {key: np.split(vectors, np.cumsum(lengths)[:-1]) for key, (lengths, vectors) in self.sequences.items()}


def decode_lookup(data: bytes) -> LookupArrays:
    """The arrays in a serialized LookupResponse, over its own bytes."""
    message = parse(pb.LookupResponse, data)
    batch, dims = message.batch_size, tuple(message.dims)
    values = array_of("values", message.values, _FLOAT32, batch * sum(dims), "batch_size x sum(dims)")
    sequences = {}
    for item in message.sequences:
        lengths = array_of(f"sequences[{item.key!r}].lengths", item.lengths, _INT32, batch, "batch_size")
        vectors = array_of(f"sequences[{item.key!r}].values", item.values, _FLOAT32, None, "")
        sequences[item.key] = (lengths, vectors.reshape(-1, item.dim))
    keys, missing = tuple(message.keys), tuple(message.missing_ranks)
    return LookupArrays(keys, dims, values.reshape(batch, sum(dims)), sequences, message.model_version, missing)


def decode_predict(data: bytes) -> tuple[dict[str, NDArray[np.float32]], str, tuple[int, ...]]:
    """The outputs by name, the model's version, and the ranks that did not answer, out of a serialized PredictResponse."""
    message = parse(pb.PredictResponse, data)
    outputs = {}
    for item in message.outputs:
        shape = tuple(item.shape)
        field, why = f"outputs[{item.name!r}]", f"shape {list(shape)}"
        outputs[item.name] = array_of(field, item.values, _FLOAT32, math.prod(shape), why).reshape(shape)
    return outputs, message.model_version, tuple(message.missing_ranks)


# -- answers of float32 arrays, as a server encodes them ------------------------------------------------------------


@lru_cache(maxsize=256)
def lookup_head(
    keys: tuple[str, ...], dims: tuple[int, ...], batch: int, version: str, missing: tuple[int, ...]
) -> bytes:
    """A serialized LookupResponse without its embeddings."""
    return pb.LookupResponse(
        keys=keys, dims=dims, batch_size=batch, model_version=version, missing_ranks=missing
    ).SerializeToString()


@lru_cache(maxsize=1024)
def output_head(name: str, shape: tuple[int, ...]) -> bytes:
    """The bytes before the float32 values of an output of a PredictResponse."""
    tensor = pb.NamedTensor(name=name, shape=shape).SerializeToString()
    size = 4 * math.prod(shape)
    values = field_head(3, size)
    return field_head(1, len(tensor) + len(values) + size) + tensor + values


@lru_cache(maxsize=64)
def predict_head(version: str, missing: tuple[int, ...]) -> bytes:
    """A serialized PredictResponse without its outputs."""
    return pb.PredictResponse(model_version=version, missing_ranks=missing).SerializeToString()
