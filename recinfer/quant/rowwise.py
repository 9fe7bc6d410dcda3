"""Float rows to packed rows block by block, with the error this makes: what packing and exporting tables run on.

Integer rows are packed and measured by ``_rows.c``, in one pass over a row. Where that was not built (it needs a C
compiler when recinfer is installed, and nothing else is lost without one), INT8 rows go through the same arithmetic in
torch's vectorised operators, and INT4 and INT2 rows through FBGEMM. All ways give FBGEMM's rows, bit for bit.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import QPARAM_BYTES, quantization_step, row_bytes, unpack_rows

try:
    from recinfer.quant._rows import pack_rows as _pack_compiled
except ImportError:  # no compiler was there
    _pack_compiled = None

__all__ = ["BLOCK_ELEMENTS", "RowError", "RowPacker"]

BLOCK_ELEMENTS = 1 << 20 if _pack_compiled is None else 1 << 18
"""Elements of a block: 1 MB of float32, which stays in a core's own cache; 4 MB where dozens of torch's operators go over
it, as each gives the interpreter lock away and takes it back, and two threads on small blocks were no faster than one."""

_PART_ELEMENTS = 1 << 18  # elements of the two scratch buffers
_LARGEST = 65504.0  # of fp16
_SMALLEST_NORMAL = 2.0**-14  # of fp16; below it a scale is rounded coarsely
_FLOAT_TYPES = {DataType.FP16: torch.float16, DataType.FP32: torch.float32}
_CODE_BITS = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}


@dataclass
class RowError:
    """How far packed rows are from the float ones, gathered block by block.

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
        """Take what another has gathered of the same table."""
        self.step, self.largest = max(self.step, other.step), max(self.largest, other.largest)
        self.squares += other.squares
        self.weight_squares += other.weight_squares


class RowPacker:
    """Packs blocks of rows of one width: fill :attr:`block`, call :meth:`pack`. For one thread at a time.

    All memory and every view on it are made here once: fresh pages cost more than the work, and views a third of it.

    Args:
        dim: columns.
        data_type: INT8, INT4, INT2, FP16 or FP32.
        measure: gather :attr:`error` as well.
        most_rows: no more will come; keeps small jobs small.
        compiled: False keeps to torch's and FBGEMM's operators.

    Attributes:
        block: float32 [rows, dim], the input; ``len(block)`` rows are the most to pack at a time, and the quickest.
        error: of all blocks since it was last set.
    """

    def __init__(
        self,
        dim: int,
        data_type: DataType,
        *,
        measure: bool = False,
        most_rows: int | None = None,
        compiled: bool = True,
    ) -> None:
        self.dim = dim
        self.data_type = data_type
        self.error = RowError()
        rows = max(1, BLOCK_ELEMENTS // max(dim, 1))
        self.block = torch.empty(rows if most_rows is None else max(1, min(rows, most_rows)), dim)
        self._measure = measure
        self._width = row_bytes(dim, data_type)
        self._views: dict[int, _Int8Views] = {}
        self._compiled = _pack_compiled if compiled and dim and data_type in _CODE_BITS else None
        if self._compiled is not None:
            self._odd = np.empty(len(self.block), dtype=np.int32)
        elif data_type is DataType.INT8:
            self._vectors = torch.empty(4, len(self.block))
            self._halves = torch.empty(len(self.block), 2, dtype=torch.float16)
            self._scratch = torch.empty(2, min(len(self.block), max(1, _PART_ELEMENTS // max(dim, 1))), dim)

    def pack(self, rows: int, out_RP: Tensor, *, table: str = "", first_row: int = 0) -> None:
        """Quantize and pack the first ``rows`` rows of :attr:`block`.

        Args:
            out_RP: uint8 [rows, row bytes]; its rows may be longer, and are then left as they are behind that.
            table, first_row: for messages.

        Raises:
            InputError: a weight is NaN or infinite, or too large for fp16; names table, row and column.
        """
        if not rows:
            return
        weight_RD = self.block[:rows]
        if self._compiled is not None:
            return self._pack_compiled(weight_RD, out_RP[:, : self._width], table, first_row)
        flat = weight_RD.view(-1)
        # One product sees every NaN and infinity, and whether anything can be too large for fp16.
        squares = float(torch.dot(flat, flat))
        if not squares < _LARGEST**2:
            self._check(weight_RD, table, first_row)
        out_RP = out_RP[:, : self._width]
        if self.data_type is DataType.INT8:
            self._pack_int8(rows, weight_RD, out_RP)
        elif self.data_type in _FLOAT_TYPES:
            self._pack_float(weight_RD, out_RP)
        else:
            self._pack_codes(weight_RD, out_RP)
        self.error.weight_squares += squares

    def _check(self, weight_RD: Tensor, table: str, first_row: int) -> None:
        """Raise InputError for rows that are not finite, or that fp16 scale and bias cannot describe."""
        good_R = torch.isfinite(weight_RD).all(dim=1)
        if self.data_type in _CODE_BITS:
            low_R, high_R = weight_RD.amin(1).half(), weight_RD.amax(1)
            levels = (1 << _CODE_BITS[self.data_type]) - 1
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
            f"{where}: values from {float(values.min()):g} to {float(values.max()):g} do not fit {self.data_type.value} "
            "(its fp16 numbers end at 65504); clip the row or use FP32"
        )

    def _pack_compiled(self, weight_RD: Tensor, out_RP: Tensor, table: str, first_row: int) -> None:
        assert self._compiled is not None
        bits = _CODE_BITS[self.data_type]
        error = self.error
        odd, weight_squares, squares, largest, step = self._compiled(
            weight_RD.numpy(), out_RP.numpy(), bits, self._odd, error.largest, error.step
        )
        if not weight_squares < _LARGEST**2:
            self._check(weight_RD, table, first_row)
        if odd:
            from recinfer.quant.tbe import quantize_rows

            rows = torch.from_numpy(self._odd[:odd].astype(np.int64))
            out_RP[rows] = quantize_rows(weight_RD[rows], bits)
        error.weight_squares += weight_squares
        if self._measure:
            error.squares += squares
            error.largest, error.step = largest, step

    # ---------------------------------------------------------------- INT8

    def _pack_int8(self, rows: int, weight_RD: Tensor, out_RP: Tensor) -> None:
        views = self._views.get(rows)
        if views is None:
            views = _Int8Views(self.block[:rows], self._vectors[:, :rows], self._halves[:rows], self._scratch)
            if rows == len(self.block):
                self._views[rows] = views
        low, scale = views.low, views.scale
        torch.amin(weight_RD, 1, out=low)
        torch.amax(weight_RD, 1, out=scale)
        least, most = float(low.amin()), float(low.amax())
        odd = None if most < 0.0 else _rows_of_signed_zeros(weight_RD, low)
        views.half_bias.copy_(low)
        views.bias.copy_(views.half_bias)
        scale.sub_(views.bias)  # the range; below zero where the bias was rounded up over a constant row
        smallest = float(scale.amin())
        if smallest <= 0:
            scale[scale == 0] = 255.0
        scale.div_(255.0)
        views.half_scale.copy_(scale)
        scale.copy_(views.half_scale)
        if smallest < 255.0 * _SMALLEST_NORMAL:
            scale[scale == 0] = 1.0  # a range too small for fp16
            views.half_scale.copy_(scale)
        torch.reciprocal(scale, out=views.inverse)
        # Codes stay from 0 to 255 by themselves where fp16 is fine enough for the bias and for the scale.
        reach = max(-least, most) * 2**-11 + 2**-24
        clamp = smallest < 255.0 * _SMALLEST_NORMAL or reach > 0.49 / 255.0 * smallest
        if out_RP.stride(0) % 4 or out_RP.storage_offset() % 4:
            out_RP[:, :QPARAM_BYTES] = views.halves
        else:
            out_RP[:, :QPARAM_BYTES].view(torch.int32).copy_(views.words)
        self._codes_int8(views, out_RP.numpy()[:, QPARAM_BYTES:], clamp)
        if odd is not None:
            from recinfer.quant.tbe import quantize_rows

            out_RP[odd] = quantize_rows(weight_RD[odd], 8)
        if self._measure:
            self._measure_int8(weight_RD, out_RP, scale, clamp)

    def _codes_int8(self, views: _Int8Views, codes_RD: np.ndarray, clamp: bool) -> None:
        """The codes, and how far they are from the weights: part by part, in two scratch buffers."""
        for part in views.parts:
            exact, rounded = part.exact, part.rounded
            torch.sub(part.weight, part.bias, out=exact)
            exact.mul_(part.inverse)
            if clamp:
                torch.clamp(exact, 0.0, 255.0, out=rounded)
                rounded.round_()
            else:
                torch.round(exact, out=rounded)
            np.copyto(codes_RD[part.rows], part.rounded_array, casting="unsafe")
            if self._measure:
                rounded.sub_(exact).mul_(part.scale)
                self.error.squares += float(torch.dot(part.flat, part.flat))

    def _measure_int8(self, weight_RD: Tensor, out_RP: Tensor, scale: Tensor, clamp: bool) -> None:
        """The largest scale and difference. Where no code was clamped, only rows of a large scale can be far off."""
        error = self.error
        step = float(scale.amax())
        error.step = max(error.step, step)
        if clamp or 0.5001 * step > error.largest:
            rows = slice(None) if clamp else (scale > error.largest / 0.5001).nonzero().squeeze(1)
            far = unpack_rows(out_RP[rows], self.dim, self.data_type).sub_(weight_RD[rows]).view(-1)
            error.largest = max(error.largest, -float(far.amin()), float(far.amax()))

    # ---------------------------------------------------------------- other precisions

    def _pack_codes(self, weight_RD: Tensor, out_RP: Tensor) -> None:
        from recinfer.quant.tbe import quantize_rows

        bits = _CODE_BITS[self.data_type]
        packed_RP = quantize_rows(weight_RD, bits)
        out_RP.copy_(packed_RP)
        if not self._measure:
            return
        step = float(quantization_step(packed_RP, self.dim, self.data_type).amax())
        self.error.step = max(self.error.step, step)
        if self.dim * bits % 16:  # FBGEMM's operator wants an even number of bytes
            values = unpack_rows(packed_RP, self.dim, self.data_type)
        else:
            fused_RP = torch.cat([packed_RP[:, QPARAM_BYTES:], packed_RP[:, :QPARAM_BYTES]], dim=1)
            values = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(fused_RP, bits)
        self._add(values.sub_(weight_RD))

    def _pack_float(self, weight_RD: Tensor, out_RP: Tensor) -> None:
        values = weight_RD.to(_FLOAT_TYPES[self.data_type])
        out_RP.copy_(values.view(torch.uint8))
        if self._measure and self.data_type is not DataType.FP32:
            self._add(values.float().sub_(weight_RD))

    def _add(self, difference: Tensor) -> None:
        flat = difference.view(-1)
        self.error.largest = max(self.error.largest, -float(flat.amin()), float(flat.amax()))
        self.error.squares += float(torch.dot(flat, flat))


class _Int8Views:
    """Views of a packer's memory for so many rows."""

    def __init__(self, weight_RD: Tensor, vectors_4R: Tensor, halves_R2: Tensor, scratch_2BD: Tensor) -> None:
        self.low, self.scale, self.bias, self.inverse = vectors_4R.unbind()
        self.halves, self.words = halves_R2.view(torch.uint8), halves_R2.view(torch.int32)
        self.half_scale, self.half_bias = halves_R2.unbind(1)
        step = scratch_2BD.shape[1]
        columns = [v.unsqueeze(1) for v in (self.bias, self.inverse, self.scale)]
        self.parts = [
            _Int8Part(slice(at, at + step), weight_RD, columns, scratch_2BD) for at in range(0, len(weight_RD), step)
        ]


class _Int8Part:
    """The views for a slice of the rows."""

    def __init__(self, rows: slice, weight_RD: Tensor, columns: list[Tensor], scratch_2BD: Tensor) -> None:
        self.rows = rows
        self.weight = weight_RD[rows]
        self.bias, self.inverse, self.scale = (column[rows] for column in columns)
        self.exact, self.rounded = scratch_2BD[:, : len(self.weight)].unbind()
        self.flat = self.rounded.view(-1)
        self.rounded_array = self.rounded.numpy()


def _rows_of_signed_zeros(weight_RD: Tensor, low_R: Tensor) -> Tensor | None:
    """Rows whose minimum is zero where there is a -0.0: which of the zeros FBGEMM takes for the bias, it alone knows."""
    zero_R = low_R == 0.0
    # As an integer -0.0 is the smallest of all.
    if not bool(zero_R.any()) or int(weight_RD.view(torch.int32).amin()) != -(2**31):
        return None
    return zero_R.nonzero().squeeze(1)
