"""Packs float rows (:mod:`recinfer.quant.rows`) in blocks and measures the quantization error.

Integer rows are packed and measured by ``_rows.c``, in one pass over a row; they are FBGEMM's rows, bit for bit.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.registry import row_format
from recinfer.quant.formats.row_format import RowError

__all__ = ["BLOCK_ELEMENTS", "RowError", "RowPacker", "pack_rows"]

BLOCK_ELEMENTS = 1 << 18
"""Elements of a block: 1 MB of float32, which fits a core's cache."""


class RowPacker:
    """Packs blocks of rows of one width: fill :attr:`block`, call :meth:`pack`. For one thread at a time.

    All memory and views are created once: fresh pages take more time than packing, and views a third of it.

    Args:
        dim: columns.
        data_type: one of ``recinfer.quant.rows.PACKED_TYPES``.
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
        self._format = row_format(data_type)
        self._width = self._format.row_bytes(dim)
        self._scratch = self._format.scratch(len(self.block))

    def pack(self, rows: int, out_RP: Tensor, *, table: str = "", first_row: int = 0) -> None:
        """Quantize and pack the first ``rows`` rows of :attr:`block`.

        Args:
            out_RP: uint8 [rows, row bytes]; its rows may be longer; the rest is unchanged.
            table, first_row: for messages.

        Raises:
            InputError: a weight is NaN or infinite, or outside the format's range; names table, row and column.
        """
        if not rows:
            return
        weight_RD, out_RP = self.block[:rows], out_RP[:, : self._width]
        self._format.pack(
            weight_RD, out_RP, self._scratch, self.error, measure=self._measure, table=table, first_row=first_row
        )


def pack_rows(
    weight_RD: Tensor, data_type: DataType, *, row_alignment: int = 1, table: str = "", first_row: int = 0
) -> Tensor:
    """Quantize and pack float rows.

    Args:
        weight_RD: floating-point rows on CPU, shape [R, D].
        data_type: one of ``recinfer.quant.rows.PACKED_TYPES``.
        row_alignment: rows are zero-padded to a multiple of this many bytes.
        table, first_row: only for messages, when the rows are a chunk of a table.

    Returns:
        uint8 tensor [R, row_bytes(D, data_type, row_alignment)]. Temporary memory is bounded for any R.

    Raises:
        InputError: a weight is NaN or infinite, or outside the format's range; names table, row and column.
    """
    if weight_RD.dim() != 2 or not weight_RD.is_floating_point():
        raise InputError(
            f"table {table!r}: got weights of shape {tuple(weight_RD.shape)} and {weight_RD.dtype}; "
            "expected a floating-point matrix [rows, columns]"
        )
    rows, dim = weight_RD.shape
    width, aligned = row_format(data_type).row_bytes(dim), row_format(data_type).row_bytes(dim, row_alignment)
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
