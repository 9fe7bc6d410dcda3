"""Converts the messages of proto/recinfer/v1/shards.proto between bytes and arrays; large fields are views.

Shapes: S streams, B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.inference.bags import offsets_of
from recinfer.serving.wire import codec
from recinfer.serving.wire.arrays import Buffer, array_bytes, bytes_field, field_head
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import shards_pb2 as pb

__all__ = [
    "PACKED_HEAD",
    "SERVICE_NAME",
    "Parts",
    "Request",
    "RequestPart",
    "decode_failure",
    "decode_part",
    "decode_request",
    "decode_response",
    "encode_failure",
    "encode_part",
    "encode_response",
    "join_request",
    "part_head",
    "part_sizes",
    "trace_field",
    "trace_headers",
]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Shards"].full_name

_NO_LENGTHS, _BYTE, _INT = 0, 1, 4
_PARTS, _VALUES, _PACKED, _FILL = 3, 1, 2, 15
_ALIGNED = 4

_TRACE = {"x-request-id": "request_id", "traceparent": "traceparent", "tracestate": "tracestate"}  # header -> field
_FAILED = field_head(3, 0)[:1]
PACKED_HEAD = field_head(_PACKED, 0)[:-1]
"""The bytes before the size of packed rows in a ``ShardResponse``."""

Answers = dict[int, list[NDArray[Any]]]
"""The arrays that each rank answered, one per part."""

Parts = list[list[Buffer]]
"""One rank's parts of a request, one per module."""


def encode_part(
    rank: int,
    module: int,
    lengths_SB: NDArray[Any],
    ids: NDArray[Any],
    weights: NDArray[np.float32] | None,
) -> list[Buffer]:
    """Parts of a ``ShardPart`` field of a request.

    Args:
        lengths_SB: number of ids of each stream and sample, of any integer type.
        ids: int32 or int64, counted from the rank's first row.
    """
    width, flat = _NO_LENGTHS, lengths_SB.reshape(-1)
    if len(ids) != flat.size or int(flat.min()) != 1:
        width = _BYTE if int(flat.max()) < 256 else _INT
    parts: list[Buffer] = [part_head(rank, module, width)]
    if width:
        parts += bytes_field(3, array_bytes(flat.astype(np.uint8 if width == _BYTE else np.uint32, copy=False)))
    parts += bytes_field(5 if ids.dtype == np.int32 else 6, array_bytes(ids))
    if weights is not None:
        parts += bytes_field(7, array_bytes(weights))
    return bytes_field(_PARTS, *parts)


@lru_cache(maxsize=4096)
def part_head(rank: int, module: int, width: int) -> bytes:
    """A ``ShardPart`` without lengths and ids; lengths take ``width`` bytes each."""
    return pb.ShardPart(rank=rank, module=module, length_bytes=width).SerializeToString()


@lru_cache(maxsize=1024)
def _request_head(version: str, batch: int) -> bytes:
    return pb.ShardRequest(version=version, batch_size=batch, stored=True).SerializeToString()


def trace_field(headers: Mapping[str, str]) -> bytes:
    """The trace of a ``ShardRequest`` as a serialized field; empty for no headers."""
    if not headers:
        return b""
    trace = pb.Trace(**{name: headers[key] for key, name in _TRACE.items() if key in headers})
    return pb.ShardRequest(trace=trace).SerializeToString()


def trace_headers(data: bytes) -> dict[str, str]:
    """The headers of :func:`trace_field` in a serialized ``ShardRequest``; empty for another message."""
    try:
        trace = codec.parse(pb.ShardRequest, data).trace
    except InputError:
        return {}
    return {key: value for key, name in _TRACE.items() if (value := getattr(trace, name))}


def join_request(version: str, batch: int, parts: Iterable[Sequence[Buffer]], trace: bytes = b"") -> bytes:
    """A serialized ``ShardRequest`` of parts of :func:`encode_part`.

    Vectors are sent as the table's stored rows, where these have fewer bytes than float32; the ranker computes the same float32
    numbers.

    Args:
        trace: see :func:`trace_field`.
    """
    return b"".join([_request_head(version, batch), *(buffer for part in parts for buffer in part), trace])


@dataclass(slots=True, eq=False)
class RequestPart:
    """One decoded part: offsets ``[S * B + 1]`` of the ids' type, ids ``[N]``, weights float32 ``[N]`` or None."""

    rank: int
    module: int
    offsets: NDArray[Any]
    ids: NDArray[Any]
    weights: NDArray[np.float32] | None


@dataclass(slots=True, eq=False)
class Request:
    """A decoded request; its parts are decoded later one by one, by callers that know the number of their streams."""

    version: str
    batch: int
    parts: Sequence[pb.ShardPart]


def decode_request(data: bytes, limits: Limits) -> Request:
    """Decode a serialized ShardRequest; raises InputError for another message, or a batch size beyond the limits."""
    message = codec.parse(pb.ShardRequest, data)
    if not 1 <= message.batch_size <= limits.max_concurrent * limits.max_batch:
        raise InputError(f"batch_size: got {message.batch_size}, expected 1 or more")
    return Request(message.version, message.batch_size, message.parts)


def decode_part(part: pb.ShardPart, streams: int, batch: int) -> RequestPart:
    """The arrays of a part for ``streams`` streams; raises InputError when they do not fit."""
    bags, ids = streams * batch, _array("ids", part.ids or part.ids_int64, _id_type(part).type)
    raw = part.lengths
    if not part.length_bytes:
        if len(ids) != bags:
            raise InputError(f"ids: got {len(ids)}, expected one for each of {bags} bags")
        offsets = np.arange(bags + 1, dtype=ids.dtype)
    else:
        if part.length_bytes not in (_BYTE, _INT) or len(raw) != bags * part.length_bytes:
            raise InputError(f"lengths: got {len(raw)} bytes of {part.length_bytes}, expected those of {bags} bags")
        lengths = np.frombuffer(raw, np.uint8 if part.length_bytes == _BYTE else np.uint32)
        if int(lengths.sum(dtype=np.uint64)) != len(ids):
            raise InputError(f"lengths: they add up to {int(lengths.sum(dtype=np.uint64))}, expected {len(ids)} ids")
        offsets = offsets_of(lengths, ids.dtype)
    weights = _array("weights", part.weights, np.float32) if part.weights else None
    if weights is not None and len(weights) != len(ids):
        raise InputError(f"weights: got {len(weights)}, expected one for each of {len(ids)} ids")
    return RequestPart(part.rank, part.module, offsets, ids, weights)


def part_sizes(part: pb.ShardPart, streams: int, batch: int) -> tuple[int, int]:
    """The number of ids of a part, and the bytes of the offsets that :func:`decode_part` would allocate."""
    item = _id_type(part).itemsize
    return len(part.ids or part.ids_int64) // item, (streams * batch + 1) * item


def _id_type(part: pb.ShardPart) -> np.dtype[Any]:
    return np.dtype(np.int32 if part.ids else np.int64)


def _array(name: str, raw: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(raw) % size:
        raise InputError(
            f"{name}: got {len(raw)} bytes, expected a multiple of {size}, the bytes of a {dtype.__name__}"
        )
    return np.frombuffer(raw, dtype)


def encode_response(values: Sequence[Sequence[NDArray[Any]]]) -> bytes:
    """A serialized ``ShardResponse``; the arrays of each entry of ``values`` follow one another in its bytes."""
    parts: list[Buffer] = []
    at = 0
    for arrays in values:
        field = [array_bytes(array) for array in arrays]
        size = sum(map(len, field))
        head = _values_head(at % _ALIGNED, size)
        parts += [head, *field]
        at += len(head) + size
    return b"".join(parts)


def encode_failure(code: str, message: str) -> bytes:
    """A serialized ``ShardResponse`` that reports an error; ``code``: name of a gRPC status."""
    return pb.ShardResponse(failure=pb.Failure(code=code, message=message)).SerializeToString()


def decode_failure(data: bytes | bytearray) -> tuple[str, str] | None:
    """Code and message of a response that reports an error; None for an answer. Raises InputError for malformed bytes."""
    if data[:1] != _FAILED:
        return None
    failure = codec.parse(pb.ShardResponse, bytes(data)).failure
    return failure.code, failure.message


@lru_cache(maxsize=1024)
def _values_head(at: int, size: int) -> bytes:
    """The bytes before ``size`` bytes of values in a ``ShardResponse`` that has ``at`` bytes (modulo 4) already."""
    head = field_head(_VALUES, size)
    short = -(at + len(head)) % _ALIGNED
    if short:  # a field that fills up to the alignment takes two bytes and its content
        return b"".join([*bytes_field(_FILL, bytes((short - 2) % _ALIGNED)), head])
    return head


def decode_response(data: bytes | bytearray) -> list[NDArray[Any]]:
    """The arrays of a response, flat, over its own bytes, packed arrays as uint8; raises InputError for malformed bytes."""
    types: dict[int, np.dtype[Any]] = {_VALUES: np.dtype(np.float32), _PACKED: np.dtype(np.uint8)}
    arrays: list[NDArray[Any]] = []
    for number, view in _fields(data):
        kind = types.get(number)
        if kind is None:
            continue
        if len(view) % kind.itemsize:
            raise InputError(f"response: got {len(view)} bytes of values, expected a multiple of {kind.itemsize}")
        arrays.append(np.frombuffer(view, kind))
    return arrays


def _fields(data: bytes | bytearray) -> Iterator[tuple[int, memoryview]]:
    """The number and bytes of each field of a message with length-delimited fields alone."""
    view, at, size = memoryview(data), 0, len(data)
    try:
        while at < size:
            key, at = _varint(data, at)
            length, at = _varint(data, at)
            if key & 7 != 2 or at + length > size:
                raise InputError(f"response: {size} bytes are not a ShardResponse")
            yield key >> 3, view[at : at + length]
            at += length
    except IndexError:
        raise InputError(f"response: {size} bytes end inside a field") from None


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise InputError("response: a number of more than 10 bytes")
