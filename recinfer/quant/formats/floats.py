"""FP16 and FP32 rows: the elements, one after another.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recinfer.modules.embedding_configs import DataType, data_type_to_dtype
from recinfer.quant.formats.row_format import LARGEST_HALF, RowError, RowFormat

__all__ = ["FP16", "FP32", "FloatRows"]


@dataclass(frozen=True)
class FloatRows(RowFormat):
    """Rows of float elements, each rounded to the nearest, halves to even.

    Attributes:
        rounding: largest error of a looked-up element, relative to the row's largest magnitude.
    """

    rounding: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Type of an element."""
        return data_type_to_dtype(self.data_type)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return self.element_bits // 8

    def fits(self, weight_RD: Tensor) -> Tensor:
        """See :class:`RowFormat`."""
        return torch.isfinite(weight_RD.to(self.dtype)).all(dim=1)

    def scratch(self, rows: int) -> None:
        """None is needed."""

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
        """See :class:`RowFormat`."""
        flat = weight_RD.view(-1)
        # One product sees every NaN and infinity, and whether anything can be too large for fp16.
        weight_squares = float(torch.dot(flat, flat))
        if not weight_squares < LARGEST_HALF**2:
            self.check(weight_RD, table, first_row)
        values = weight_RD.to(self.dtype)
        out_RP.copy_(values.view(torch.uint8))
        error.weight_squares += weight_squares
        if measure and self.dtype is not torch.float32:
            off = values.float().sub_(weight_RD).view(-1)
            error.largest = max(error.largest, -float(off.amin()), float(off.amax()))
            error.squares += float(torch.dot(off, off))

    def unpack(self, packed_RP: Tensor, dim: int) -> Tensor:
        """See :class:`RowFormat`."""
        return packed_RP[:, : self.row_bytes(dim)].contiguous().view(self.dtype).float()

    def reference_pack(self, weight_RD: Tensor) -> Tensor:
        """See :class:`RowFormat`."""
        return weight_RD.to(self.dtype).contiguous().view(torch.uint8)

    def step(self, packed_RP: Tensor) -> Tensor:
        """See :class:`RowFormat`."""
        return torch.zeros(packed_RP.shape[0])

    def rounding_bound(self, vectors_RD: Tensor) -> Tensor:
        """See :class:`RowFormat`."""
        return self.rounding * vectors_RD.abs().amax(1, keepdim=True) + 1e-7

    def slice_columns(self, packed_RP: Tensor, dim: int, start: int, stop: int, out_RP: Tensor) -> None:
        """See :class:`RowFormat`."""
        size = self.element_bytes
        out_RP[:, : (stop - start) * size] = packed_RP[:, start * size : stop * size]

    def join_columns(
        self, pieces: Sequence[tuple[int, int, Tensor]], dim: int, out_RP: Tensor, *, table: str, first_row: int
    ) -> None:
        """See :class:`RowFormat`."""
        size = self.element_bytes
        for start, stop, packed in pieces:
            out_RP[:, start * size : stop * size] = packed[:, : (stop - start) * size]


FP16 = FloatRows(
    data_type=DataType.FP16,
    code=4,
    element_bits=16,
    fbgemm="FP16",
    narrower=DataType.INT8,
    limit="fp16 ends at 65504",
    rounding=2**-9,
)
FP32 = FloatRows(data_type=DataType.FP32, code=5, element_bits=32, fbgemm="FP32", narrower=DataType.FP16, rounding=2e-6)
