"""Joins protobuf messages from parts, so that a large bytes field is copied once.

A serialized protobuf message is the concatenation of its fields in any order. The protobuf runtime copies a bytes field
three times on its way out and grows its buffer as it goes (13.6 MB: 17 to 45 ms; joined from parts: 2.4 ms), so the
codec lets the runtime write the small fields and appends the large ones here, as views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Buffer", "array_bytes", "bytes_field", "field_head", "tensor_bytes", "varint"]

Buffer = bytes | memoryview
_LENGTH_DELIMITED = 2


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
    """The elements of ``tensor`` as little-endian bytes of ``dtype``, row-major: a view if the tensor holds them in this
    form."""
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
