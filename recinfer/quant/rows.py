"""The format of packed rows (FBGEMM's, where it has the precision): sizes, slicing and joining columns, and unpacking.

A packed row is bytes, in the order that the table-batched-embedding (TBE) operator reads::

    INT8, INT4, INT2:  scale (fp16) | bias (fp16) | codes, low bits first | zero padding to the row alignment
    floats:            the elements | zero padding to the row alignment

:mod:`recinfer.quant.formats` holds an object for each precision; the functions here take the precision and check their
arguments.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.registry import ROW_FORMATS, row_format

__all__ = [
    "OUTPUT_DTYPES",
    "PACKED_TYPES",
    "columns_per_byte",
    "join_packed_columns",
    "padded_dim",
    "quantization_step",
    "row_bytes",
    "slice_packed_columns",
    "unpack_rows",
]

PACKED_TYPES = tuple(known.data_type for known in ROW_FORMATS)
"""The precisions a table can be stored in."""

OUTPUT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes of looked-up vectors; bfloat16 needs FBGEMM."""


def columns_per_byte(data_type: DataType) -> int:
    """How many columns share one byte: 1, or 2 for INT4 and 4 for INT2. Slices at multiples of it are byte slices."""
    return row_format(data_type).columns_per_byte


def padded_dim(dim: int, data_type: DataType) -> int:
    """``dim`` rounded up to whole bytes: the operator addresses INT4 and INT2 rows by whole bytes of codes."""
    return row_format(data_type).padded_dim(dim)


def row_bytes(dim: int, data_type: DataType, row_alignment: int = 1) -> int:
    """Bytes of one packed row of ``dim`` columns; ``row_alignment`` is 1 on CPU and 16 on CUDA."""
    size: int = row_format(data_type).row_bytes(dim, row_alignment)
    return size


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
    rows = row_format(data_type)
    if (col_start, col_stop) == (0, dim) and packed_RP.shape[1] == rows.row_bytes(dim, row_alignment):
        return packed_RP
    out = torch.zeros((packed_RP.shape[0], rows.row_bytes(col_stop - col_start, row_alignment)), dtype=torch.uint8)
    rows.slice_columns(packed_RP, dim, col_start, col_stop, out)
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
    rows = row_format(data_type)
    out = torch.zeros((first.shape[0], rows.row_bytes(dim)), dtype=torch.uint8)
    rows.join_columns(ordered, dim, out, table=table, first_row=first_row)
    return out


def quantization_step(packed_RP: Tensor, dim: int, data_type: DataType) -> Tensor:
    """The scale of every row, float32 [R]: half of it bounds an element's rounding error (rounding scale and bias to
    fp16 adds up to ``2**-11`` of the row's largest magnitude). Zeros for formats without a scale; 1 for a row of one
    value, which is stored exactly."""
    return row_format(data_type).step(packed_RP)


def unpack_rows(packed_RP: Tensor, dim: int, data_type: DataType) -> Tensor:
    """Packed rows as float32 [R, dim], in plain torch."""
    rows = row_format(data_type)
    need = rows.row_bytes(dim)
    if packed_RP.dtype != torch.uint8 or packed_RP.dim() != 2 or packed_RP.shape[1] < need:
        raise InputError(
            f"got packed rows of shape {tuple(packed_RP.shape)} and {packed_RP.dtype}; "
            f"expected uint8 [rows, >= {need}] for {dim} {data_type.value} columns"
        )
    return rows.unpack(packed_RP, dim)
