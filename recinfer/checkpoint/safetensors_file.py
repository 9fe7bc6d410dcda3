"""Finds the tensors of a safetensors file, by the head of the file alone.

Format: the length of a JSON object as eight bytes, little endian, the object, then the bytes of all tensors
(https://github.com/huggingface/safetensors). The package of that name maps the file, so that the system would end the
process (SIGBUS) where a training run replaces the file meanwhile; byte ranges that are read fail with an error.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch

from recinfer.checkpoint.torch_file import TensorBytes
from recinfer.errors import CheckpointError

__all__ = ["is_safetensors", "read_safetensors"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEAD = 100_000_000  # the limit of the format's own reader


def is_safetensors(path: Path) -> bool:
    """Whether the file begins as a safetensors file does."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def read_safetensors(path: Path) -> dict[str, TensorBytes]:
    """The tensors of the file by name.

    Raises:
        CheckpointError: the head is damaged, or a tensor is beyond the end of the file or of a dtype that torch lacks.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_LONGEST_HEAD, size - 8):
            raise CheckpointError(f"{path}: the head has {length} bytes, the file {size}; the file is damaged")
        head = file.read(length)
    try:
        entries = json.loads(head)
        entries.pop("__metadata__", None)
        return {name: _tensor(path, entry, 8 + length, size) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the head of this safetensors file is damaged: {error}") from None


def _tensor(path: Path, entry: dict[str, Any], start: int, size: int) -> TensorBytes:
    shape = tuple(int(n) for n in entry["shape"])
    first, last = entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: a tensor is {entry['dtype']}; expected one of {', '.join(_DTYPES)}")
    if not 0 <= first <= last <= size - start:
        raise CheckpointError(f"{path}: a tensor has the bytes {first} to {last}, beyond the end; the file is damaged")
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorBytes(path, start + first, last - first, dtype, shape, strides)
