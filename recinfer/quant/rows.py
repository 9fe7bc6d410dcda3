"""The format of packed rows (FBGEMM's): sizes, slicing and joining columns, and unpacking.

A packed row is bytes, in the order that the table-batched-embedding (TBE) operator reads::

    INT8, INT4, INT2:  scale (fp16) | bias (fp16) | codes, low bits first | zero padding to the row alignment
    FP16, FP32:        the elements | zero padding to the row alignment

``value = scale * code + bias``. Scale and bias come from the whole row (its minimum and range, Guan et al.,
"Post-Training 4-bit Quantization on Embedding Tables", 2019, without the clipping search), so a column slice of a
packed row dequantizes to the same numbers, bit for bit, as those columns of the whole row.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import DataType

__all__ = [
    "CODE_BITS",
    "FLOAT_TYPES",
    "OUTPUT_DTYPES",
    "PACKED_TYPES",
    "QPARAM_BYTES",
    "columns_per_byte",
    "join_packed_columns",
    "padded_dim",
    "quantization_step",
    "row_bytes",
    "slice_packed_columns",
    "unpack_rows",
]

QPARAM_BYTES = 4
"""Bytes of the fp16 scale and fp16 bias at the start of an integer row."""

PACKED_TYPES = (DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32)
"""The precisions a table can be stored in."""

CODE_BITS = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}
"""Bits per code of the integer precisions."""

FLOAT_TYPES = {DataType.FP16: torch.float16, DataType.FP32: torch.float32}
"""Element dtype of the float precisions."""


OUTPUT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes of looked-up vectors; bfloat16 needs FBGEMM."""


def _check_type(data_type: DataType) -> None:
    """Raise ConfigError for a precision that tables cannot be stored in."""
    if data_type not in PACKED_TYPES:
        raise ConfigError(
            f"no packed layout for {data_type}; expected one of {', '.join(t.value for t in PACKED_TYPES)}"
        )


def columns_per_byte(data_type: DataType) -> int:
    """How many columns share one byte: 1, or 2 for INT4 and 4 for INT2. Slices at multiples of it are byte slices."""
    _check_type(data_type)
    return 8 // CODE_BITS[data_type] if data_type in CODE_BITS else 1


def padded_dim(dim: int, data_type: DataType) -> int:
    """``dim`` rounded up to whole bytes: the operator addresses INT4 and INT2 rows by whole bytes of codes."""
    per_byte = columns_per_byte(data_type)
    return -(-dim // per_byte) * per_byte


def row_bytes(dim: int, data_type: DataType, row_alignment: int = 1) -> int:
    """Bytes of one packed row of ``dim`` columns; ``row_alignment`` is 1 on CPU and 16 on CUDA."""
    _check_type(data_type)
    if data_type in CODE_BITS:
        size = QPARAM_BYTES + padded_dim(dim, data_type) * CODE_BITS[data_type] // 8
    else:
        size = dim * data_type.bits // 8
    return -(-size // row_alignment) * row_alignment


def _qparams(packed_RP: Tensor) -> Tensor:
    """Scale and bias of packed integer rows, fp16 [R, 2]."""
    # clone, not contiguous(): a single row counts as contiguous with any stride, and view() then fails
    return packed_RP[:, :QPARAM_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float16)


def _codes(packed_RP: Tensor, dim: int, data_type: DataType) -> Tensor:
    """The codes of packed integer rows, one per uint8, shape [R, dim]."""
    bits = CODE_BITS[data_type]
    payload = packed_RP[:, QPARAM_BYTES : QPARAM_BYTES + padded_dim(dim, data_type) * bits // 8]
    if bits == 8:
        return payload
    mask = (1 << bits) - 1
    parts = [(payload >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).reshape(packed_RP.shape[0], -1)[:, :dim]


def _join_codes(codes_RD: Tensor, data_type: DataType) -> Tensor:
    """The inverse of :func:`_codes`: bytes of codes, low bits first, zero codes in the padding."""
    bits = CODE_BITS[data_type]
    if bits == 8:
        return codes_RD
    rows, dim = codes_RD.shape
    per_byte = 8 // bits
    full = torch.zeros((rows, padded_dim(dim, data_type)), dtype=torch.uint8)
    full[:, :dim] = codes_RD
    grouped = full.view(rows, -1, per_byte)
    joined = grouped[:, :, 0].clone()
    for k in range(1, per_byte):
        joined |= grouped[:, :, k] << (bits * k)
    return joined


def slice_packed_columns(
    packed_RP: Tensor, dim: int, data_type: DataType, col_start: int, col_stop: int, *, row_alignment: int = 1
) -> Tensor:
    """Columns ``col_start:col_stop`` of packed rows as packed rows that keep the full row's scale and bias.

    Args:
        packed_RP: uint8 [R, >= row_bytes(dim, data_type)].
        dim: columns of the full rows.

    Returns:
        uint8 [R, row_bytes(col_stop - col_start, data_type, row_alignment)].

    Raises:
        ConfigError: the columns are not inside the row.
    """
    if not 0 <= col_start < col_stop <= dim:
        raise ConfigError(f"columns {col_start}:{col_stop} are not inside a row of {dim} columns")
    if (col_start, col_stop) == (0, dim) and packed_RP.shape[1] == row_bytes(dim, data_type, row_alignment):
        return packed_RP
    width = col_stop - col_start
    out = torch.zeros((packed_RP.shape[0], row_bytes(width, data_type, row_alignment)), dtype=torch.uint8)
    if data_type in FLOAT_TYPES:
        size = data_type.bits // 8
        out[:, : width * size] = packed_RP[:, col_start * size : col_stop * size]
        return out
    out[:, :QPARAM_BYTES] = packed_RP[:, :QPARAM_BYTES]
    per_byte = columns_per_byte(data_type)
    payload = padded_dim(width, data_type) // per_byte
    if col_start % per_byte == 0 and (col_stop % per_byte == 0 or col_stop == dim):
        first = QPARAM_BYTES + col_start // per_byte
        out[:, QPARAM_BYTES : QPARAM_BYTES + payload] = packed_RP[:, first : first + payload]
    else:  # a slice inside a byte: the codes move, their values do not
        codes = _codes(packed_RP, dim, data_type)[:, col_start:col_stop]
        out[:, QPARAM_BYTES : QPARAM_BYTES + payload] = _join_codes(codes, data_type)
    return out


def join_packed_columns(
    pieces: Sequence[tuple[int, int, Tensor]], dim: int, data_type: DataType, *, table: str = "", first_row: int = 0
) -> Tensor:
    """Join the column slices ``pieces`` to whole rows: the inverse of :func:`slice_packed_columns`.

    Args:
        pieces: (col_start, col_stop, uint8 [R, row_bytes(col_stop - col_start, data_type)]), covering the columns once.
        dim: columns of the whole rows.
        table, first_row: only for messages.

    Returns:
        uint8 [R, row_bytes(dim, data_type)]; the only piece itself when it is whole.

    Raises:
        ConfigError: the pieces do not cover the columns once.
        InputError: pieces of one row carry different scales or biases: they are not slices of one row.
    """
    ordered = sorted(pieces, key=lambda piece: piece[0])
    edges = [0, *(stop for _, stop, _ in ordered)]
    if [start for start, _, _ in ordered] != edges[:-1] or edges[-1] != dim:
        spans = ", ".join(f"{start}:{stop}" for start, stop, _ in ordered)
        raise ConfigError(f"table {table!r}: column pieces {spans} do not cover 0:{dim} exactly once")
    first = ordered[0][2]
    if len(ordered) == 1:
        return first
    out = torch.zeros((first.shape[0], row_bytes(dim, data_type)), dtype=torch.uint8)
    if data_type in FLOAT_TYPES:
        size = data_type.bits // 8
        for start, stop, packed in ordered:
            out[:, start * size : stop * size] = packed[:, : (stop - start) * size]
        return out
    for _, _, packed in ordered[1:]:
        if not torch.equal(packed[:, :QPARAM_BYTES], first[:, :QPARAM_BYTES]):
            row = int((packed[:, :QPARAM_BYTES] != first[:, :QPARAM_BYTES]).any(1).nonzero()[0])
            raise InputError(
                f"table {table!r}, row {first_row + row}: its column pieces have different scales or biases; "
                f"expected those of the whole row in each"
            )
    out[:, :QPARAM_BYTES] = first[:, :QPARAM_BYTES]
    per_byte = columns_per_byte(data_type)
    if all(start % per_byte == 0 for start, _, _ in ordered):
        for start, stop, packed in ordered:
            at, count = QPARAM_BYTES + start // per_byte, padded_dim(stop - start, data_type) // per_byte
            out[:, at : at + count] = packed[:, QPARAM_BYTES : QPARAM_BYTES + count]
    else:  # a cut inside a byte
        codes = torch.cat([_codes(packed, stop - start, data_type) for start, stop, packed in ordered], dim=1)
        out[:, QPARAM_BYTES:] = _join_codes(codes, data_type)
    return out


def quantization_step(packed_RP: Tensor, dim: int, data_type: DataType) -> Tensor:
    """The scale of every row, float32 [R]: half of it bounds an element's rounding error (rounding scale and bias to
    fp16 adds up to ``2**-11`` of the row's largest magnitude). Zeros for FP16 and FP32; 1 for a row of one value, which
    is stored exactly."""
    if data_type in FLOAT_TYPES:
        return torch.zeros(packed_RP.shape[0])
    return _qparams(packed_RP)[:, 0].float()


def unpack_rows(packed_RP: Tensor, dim: int, data_type: DataType) -> Tensor:
    """Packed rows as float32 [R, dim], in plain torch: ``scale * code + bias``."""
    _check_type(data_type)
    need = row_bytes(dim, data_type)
    if packed_RP.dtype != torch.uint8 or packed_RP.dim() != 2 or packed_RP.shape[1] < need:
        raise InputError(
            f"got packed rows of shape {tuple(packed_RP.shape)} and {packed_RP.dtype}; "
            f"expected uint8 [rows, >= {need}] for {dim} {data_type.value} columns"
        )
    if data_type in FLOAT_TYPES:
        return packed_RP[:, :need].contiguous().view(FLOAT_TYPES[data_type]).float()
    qparams = _qparams(packed_RP).float()
    return _codes(packed_RP, dim, data_type).float() * qparams[:, :1] + qparams[:, 1:]
