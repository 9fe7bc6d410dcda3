"""INT8, INT4 and INT2 rows: a scale, a bias, and a code for each element.

``value = scale * code + bias``. Scale and bias come from the whole row (its minimum and range, Guan et al.,
"Post-Training 4-bit Quantization on Embedding Tables", 2019, without the clipping search), so a column slice of a
packed row dequantizes to the same numbers, bit for bit, as those columns of the whole row.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.row_format import LARGEST_HALF, RowError, RowFormat

__all__ = ["INT2", "INT4", "INT8", "QPARAM_BYTES", "IntegerRows", "quantize_rows"]

QPARAM_BYTES = 4
"""Bytes of the fp16 scale and fp16 bias at the start of an integer row."""


def quantize_rows(weight_RD: Tensor, bits: int) -> Tensor:
    """FBGEMM's row-wise quantization with fp16 scale and bias moved before the codes, as the TBE operator reads them.

    Args:
        weight_RD: finite float32 rows on CPU, contiguous.
        bits: 8, 4 or 2.

    Returns:
        uint8 [R, 4 + ceil(D * bits / 8)].
    """
    import fbgemm_gpu  # noqa: F401  registers the operator, which most rows do without

    rows, dim = weight_RD.shape
    per_byte = 8 // bits
    payload = -(-dim // per_byte)
    if rows == 0:
        return torch.empty((0, QPARAM_BYTES + payload), dtype=torch.uint8)
    fill = -dim % (2 * per_byte)
    if fill:  # the operator needs an even number of bytes; repeating a column changes neither minimum nor maximum
        weight_RD = torch.cat([weight_RD, weight_RD[:, :1].expand(rows, fill)], dim=1)
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight_RD, bits)
    out = torch.cat([fused[:, -QPARAM_BYTES:], fused[:, :payload]], dim=1)
    if dim % per_byte:
        out[:, -1] &= (1 << (bits * (dim % per_byte))) - 1
    return out


@dataclass(frozen=True)
class IntegerRows(RowFormat):
    """Rows of integer codes behind an fp16 scale and an fp16 bias; low bits of a byte hold the first code."""

    limit: str = "fp16 ends at 65504"
    lead_bytes: int = QPARAM_BYTES

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.element_bits) - 1

    def fits(self, weight_RD: Tensor) -> Tensor:
        """Whether scale and bias are numbers of fp16."""
        low_R, high_R = weight_RD.amin(1).half(), weight_RD.amax(1)
        return torch.isfinite(low_R) & torch.isfinite(((high_R - low_R.float()) / self.levels).half())

    def scratch(self, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Numbers of rows that FBGEMM must pack."""
        return np.empty(rows, dtype=np.int32)

    def pack(
        self,
        weight_RD: Tensor,
        out_RP: Tensor,
        scratch: Any,
        error: RowError,
        *,
        measure: bool,
        table: str,
        first_row: int,
    ) -> None:
        """See :class:`RowFormat`; one pass over a row, by ``_rows.c``. The rows are FBGEMM's, bit for bit."""
        from recinfer.quant._rows import pack_rows  # compiled; the planner does without it

        odd, weight_squares, squares, largest, step = pack_rows(
            weight_RD.numpy(), out_RP.numpy(), self.code, scratch, error.largest, error.step
        )
        if not weight_squares < LARGEST_HALF**2:
            self.check(weight_RD, table, first_row)
        if odd:  # FBGEMM decides which of the zeros is the bias
            rows = torch.from_numpy(scratch[:odd].astype(np.int64))
            out_RP[rows] = quantize_rows(weight_RD[rows], self.element_bits)
        error.weight_squares += weight_squares
        if measure:
            error.squares += squares
            error.largest, error.step = largest, step

    def unpack(self, packed_RP: Tensor, dim: int) -> Tensor:
        """See :class:`RowFormat`: ``scale * code + bias``."""
        qparams = self._qparams(packed_RP).float()
        return self._codes(packed_RP, dim).float() * qparams[:, :1] + qparams[:, 1:]

    def reference_pack(self, weight_RD: Tensor) -> Tensor:
        """See :class:`RowFormat`. Rounding is half to even, as on the scalar path of FBGEMM's
        ``FloatToFusedNBitRowwiseQuantizedSBHalf``."""
        weight = weight_RD.float()
        low_R1 = weight.min(dim=1, keepdim=True).values.half().float()
        high_R1 = weight.max(dim=1, keepdim=True).values
        spread = high_R1 - low_R1
        scale_R1 = torch.where(spread == 0, torch.ones_like(spread), spread / self.levels).half().float()
        scale_R1 = torch.where(scale_R1 == 0, torch.ones_like(scale_R1), scale_R1)
        inverse_R1 = 1.0 / scale_R1
        # A subnormal fp16 scale can have an infinite inverse; the kernel then falls back to scale 1.
        scale_R1 = torch.where(torch.isinf(inverse_R1), torch.ones_like(scale_R1), scale_R1)
        inverse_R1 = torch.where(torch.isinf(inverse_R1), torch.ones_like(inverse_R1), inverse_R1)
        codes = torch.round((weight - low_R1) * inverse_R1).clamp(0, self.levels).to(torch.uint8)
        qparams = torch.cat([scale_R1, low_R1], dim=1).half().view(torch.uint8)
        return torch.cat([qparams, self._join_codes(codes)], dim=1)

    def step(self, packed_RP: Tensor) -> Tensor:
        """See :class:`RowFormat`; 1 for a row of one value, which is stored exactly."""
        return self._qparams(packed_RP)[:, 0].float()

    def rounding_bound(self, vectors_RD: Tensor) -> Tensor:
        """See :class:`RowFormat`: half a step of the row's own range.

        A row of one value has no step, although FBGEMM stores the scale 1 for it. Where the range is so small that its
        scale is below fp16's normal numbers, the scale is off by up to 2**-25, and the largest code by that times itself.
        """
        bound = 2**-9 * vectors_RD.abs().amax(1, keepdim=True) + 1e-7
        steps = (vectors_RD.amax(1, keepdim=True) - vectors_RD.amin(1, keepdim=True)) / self.levels
        return bound + steps / 2 + torch.where(steps < 2**-13, self.levels * 2**-25, 0.0)

    def slice_columns(self, packed_RP: Tensor, dim: int, start: int, stop: int, out_RP: Tensor) -> None:
        """See :class:`RowFormat`; the pieces keep the whole row's scale and bias."""
        out_RP[:, :QPARAM_BYTES] = packed_RP[:, :QPARAM_BYTES]
        per_byte = self.columns_per_byte
        payload = self.padded_dim(stop - start) // per_byte
        if start % per_byte == 0 and (stop % per_byte == 0 or stop == dim):
            first = QPARAM_BYTES + start // per_byte
            out_RP[:, QPARAM_BYTES : QPARAM_BYTES + payload] = packed_RP[:, first : first + payload]
        else:  # a slice inside a byte: the codes move, their values do not
            codes = self._codes(packed_RP, dim)[:, start:stop]
            out_RP[:, QPARAM_BYTES : QPARAM_BYTES + payload] = self._join_codes(codes)

    def join_columns(
        self, pieces: Sequence[tuple[int, int, Tensor]], dim: int, out_RP: Tensor, *, table: str, first_row: int
    ) -> None:
        """See :class:`RowFormat`."""
        lead = pieces[0][2][:, :QPARAM_BYTES]
        for _, _, packed in pieces[1:]:
            if not torch.equal(packed[:, :QPARAM_BYTES], lead):
                row = int((packed[:, :QPARAM_BYTES] != lead).any(1).nonzero()[0])
                raise InputError(
                    f"table {table!r}, row {first_row + row}: its column pieces have different scales or biases; "
                    f"expected those of the whole row in each"
                )
        out_RP[:, :QPARAM_BYTES] = lead
        per_byte = self.columns_per_byte
        if all(start % per_byte == 0 for start, _, _ in pieces):
            for start, stop, packed in pieces:
                at, count = QPARAM_BYTES + start // per_byte, self.padded_dim(stop - start) // per_byte
                out_RP[:, at : at + count] = packed[:, QPARAM_BYTES : QPARAM_BYTES + count]
        else:  # a cut inside a byte
            codes = torch.cat([self._codes(packed, stop - start) for start, stop, packed in pieces], dim=1)
            out_RP[:, QPARAM_BYTES:] = self._join_codes(codes)

    def _qparams(self, packed_RP: Tensor) -> Tensor:
        """Scale and bias, fp16 [R, 2]."""
        # clone, not contiguous(): a single row counts as contiguous with any stride, and view() then fails
        return packed_RP[:, :QPARAM_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float16)

    def _codes(self, packed_RP: Tensor, dim: int) -> Tensor:
        """The codes, one per uint8, shape [R, dim]."""
        bits = self.element_bits
        payload = packed_RP[:, QPARAM_BYTES : self.row_bytes(dim)]
        if bits == 8:
            return payload
        parts = [(payload >> shift) & self.levels for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).reshape(packed_RP.shape[0], -1)[:, :dim]

    def _join_codes(self, codes_RD: Tensor) -> Tensor:
        """The inverse of :meth:`_codes`: bytes of codes, zero codes in the padding."""
        bits = self.element_bits
        if bits == 8:
            return codes_RD
        rows, dim = codes_RD.shape
        full = torch.zeros((rows, self.padded_dim(dim)), dtype=torch.uint8)
        full[:, :dim] = codes_RD
        grouped = full.view(rows, -1, self.columns_per_byte)
        joined = grouped[:, :, 0].clone()
        for k in range(1, self.columns_per_byte):
            joined |= grouped[:, :, k] << (bits * k)
        return joined


# The columns of a cut are whole bytes of INT2 in both of the formats whose codes share bytes.
INT2 = IntegerRows(data_type=DataType.INT2, code=1, element_bits=2, fbgemm="INT2", narrower=None, column_unit=4)
INT4 = IntegerRows(
    data_type=DataType.INT4, code=2, element_bits=4, fbgemm="INT4", narrower=DataType.INT2, column_unit=4
)
INT8 = IntegerRows(data_type=DataType.INT8, code=3, element_bits=8, fbgemm="INT8", narrower=DataType.INT4)
