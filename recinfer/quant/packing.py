"""Packs float rows (:mod:`recinfer.quant.rows`) in blocks and measures the quantization error.

Integer rows are packed and measured by ``_rows.c``, in one pass over a row; they are FBGEMM's rows, bit for bit.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant._rows import pack_rows as _pack_rows
from recinfer.quant.rows import CODE_BITS, FLOAT_TYPES, row_bytes

__all__ = ["BLOCK_ELEMENTS", "RowError", "RowPacker", "pack_rows"]

BLOCK_ELEMENTS = 1 << 18
"""Elements of a block: 1 MB of float32, which fits a core's cache."""

_LARGEST = 65504.0  # largest number of fp16


@dataclass
class RowError:
    """The quantization error of packed rows, accumulated over blocks.

    Attributes:
        step: the largest scale (0 for FP16 and FP32).
        largest: the largest absolute difference.
        squares, weight_squares: sums of squares of the differences and of the weights.
    """

    step: float = 0.0
    largest: float = 0.0
    squares: float = 0.0
    weight_squares: float = 0.0

    def merge(self, other: RowError) -> None:
        """Add the error of other rows of the same table."""
        self.step, self.largest = max(self.step, other.step), max(self.largest, other.largest)
        self.squares += other.squares
        self.weight_squares += other.weight_squares


class RowPacker:
    """Packs blocks of rows of one width: fill :attr:`block`, call :meth:`pack`. For one thread at a time.

    All memory and views are created once: fresh pages take more time than packing, and views a third of it.

    Args:
        dim: columns.
        data_type: INT8, INT4, INT2, FP16 or FP32.
        measure: gather :attr:`error` as well.
        most_rows: the most rows that will be packed; limits memory for small tables.

    Attributes:
        block: float32 [rows, dim], the input; at most ``len(block)`` rows are packed at a time, which is also the
            fastest.
        error: of all blocks since it was last set.
    """

    def __init__(self, dim: int, data_type: DataType, *, measure: bool = False, most_rows: int | None = None) -> None:
        self.dim = dim
        self.data_type = data_type
        self.error = RowError()
        rows = max(1, BLOCK_ELEMENTS // max(dim, 1))
        self.block = torch.empty(rows if most_rows is None else max(1, min(rows, most_rows)), dim)
        self._measure = measure
        self._width = row_bytes(dim, data_type)
        if data_type in CODE_BITS:
            self._odd = np.empty(len(self.block), dtype=np.int32)

    def pack(self, rows: int, out_RP: Tensor, *, table: str = "", first_row: int = 0) -> None:
        """Quantize and pack the first ``rows`` rows of :attr:`block`.

        Args:
            out_RP: uint8 [rows, row bytes]; its rows may be longer; the rest is unchanged.
            table, first_row: for messages.

        Raises:
            InputError: a weight is NaN or infinite, or too large for fp16; names table, row and column.
        """
        if not rows:
            return
        weight_RD, out_RP = self.block[:rows], out_RP[:, : self._width]
        if self.data_type in FLOAT_TYPES:
            self._pack_floats(weight_RD, out_RP, table, first_row)
        else:
            self._pack_codes(weight_RD, out_RP, table, first_row)

    def _check(self, weight_RD: Tensor, table: str, first_row: int) -> None:
        """Raise InputError for rows that are not finite, or whose range exceeds fp16 scale and bias."""
        good_R = torch.isfinite(weight_RD).all(dim=1)
        if self.data_type in CODE_BITS:
            low_R, high_R = weight_RD.amin(1).half(), weight_RD.amax(1)
            levels = (1 << CODE_BITS[self.data_type]) - 1
            good_R &= torch.isfinite(low_R) & torch.isfinite(((high_R - low_R.float()) / levels).half())
        elif self.data_type is DataType.FP16:
            good_R &= torch.isfinite(weight_RD.half()).all(dim=1)
        if bool(good_R.all()):
            return
        row = int((~good_R).nonzero()[0])
        values = weight_RD[row]
        bad = (~torch.isfinite(values)).nonzero()
        where = f"table {table!r}, row {first_row + row}"
        if len(bad):
            column = int(bad[0])
            raise InputError(f"{where}, column {column}: got {float(values[column])}; expected finite weights")
        raise InputError(
            f"{where}: values from {float(values.min()):g} to {float(values.max()):g} exceed the range of "
            f"{self.data_type.value} (fp16 ends at 65504); clip the row or use FP32"
        )

    def _pack_codes(self, weight_RD: Tensor, out_RP: Tensor, table: str, first_row: int) -> None:
        bits = CODE_BITS[self.data_type]
        error = self.error
        odd, weight_squares, squares, largest, step = _pack_rows(
            weight_RD.numpy(), out_RP.numpy(), bits, self._odd, error.largest, error.step
        )
        if not weight_squares < _LARGEST**2:
            self._check(weight_RD, table, first_row)
        if odd:  # FBGEMM decides which of the zeros is the bias
            rows = torch.from_numpy(self._odd[:odd].astype(np.int64))
            from recinfer.quant.tbe import quantize_rows  # FBGEMM, which rows of other elements do without

            out_RP[rows] = quantize_rows(weight_RD[rows], bits)
        error.weight_squares += weight_squares
        if self._measure:
            error.squares += squares
            error.largest, error.step = largest, step

    def _pack_floats(self, weight_RD: Tensor, out_RP: Tensor, table: str, first_row: int) -> None:
        error, flat = self.error, weight_RD.view(-1)
        # One product sees every NaN and infinity, and whether anything can be too large for fp16.
        weight_squares = float(torch.dot(flat, flat))
        if not weight_squares < _LARGEST**2:
            self._check(weight_RD, table, first_row)
        values = weight_RD.to(FLOAT_TYPES[self.data_type])
        out_RP.copy_(values.view(torch.uint8))
        error.weight_squares += weight_squares
        if self._measure and self.data_type is not DataType.FP32:
            off = values.float().sub_(weight_RD).view(-1)
            error.largest = max(error.largest, -float(off.amin()), float(off.amax()))
            error.squares += float(torch.dot(off, off))


def pack_rows(
    weight_RD: Tensor, data_type: DataType, *, row_alignment: int = 1, table: str = "", first_row: int = 0
) -> Tensor:
    """Quantize and pack float rows.

    Args:
        weight_RD: floating-point rows on CPU, shape [R, D].
        data_type: INT8, INT4, INT2, FP16 or FP32.
        row_alignment: rows are zero-padded to a multiple of this many bytes.
        table, first_row: only for messages, when the rows are a chunk of a table.

    Returns:
        uint8 tensor [R, row_bytes(D, data_type, row_alignment)]. Temporary memory is bounded for any R.

    Raises:
        InputError: a weight is NaN or infinite, or too large for fp16; names table, row and column.
    """
    if weight_RD.dim() != 2 or not weight_RD.is_floating_point():
        raise InputError(
            f"table {table!r}: got weights of shape {tuple(weight_RD.shape)} and {weight_RD.dtype}; "
            "expected a floating-point matrix [rows, columns]"
        )
    rows, dim = weight_RD.shape
    width = row_bytes(dim, data_type, 1)
    aligned = row_bytes(dim, data_type, row_alignment)
    out_RP = torch.empty((rows, aligned), dtype=torch.uint8)
    if aligned != width:
        out_RP[:, width:] = 0
    packer = RowPacker(dim, data_type, most_rows=rows)
    step = len(packer.block)
    for start in range(0, rows, step):
        chunk = weight_RD[start : start + step].detach()
        packer.block[: len(chunk)] = chunk
        packer.pack(len(chunk), out_RP[start : start + step], table=table, first_row=first_row + start)
    return out_RP
