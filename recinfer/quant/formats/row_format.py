"""The row format: what code outside a format may ask of it.

Shape suffixes: R rows, D columns, P bytes of a packed row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType

__all__ = ["RowError", "RowFormat"]

LARGEST_HALF = 65504.0
"""The largest number of fp16: rows whose weights are far below it fit every format."""


@dataclass
class RowError:
    """The quantization error of packed rows, accumulated over blocks.

    Attributes:
        step: the largest scale (0 for formats without a scale).
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


@dataclass(frozen=True)
class RowFormat(ABC):
    """How the elements of a row become bytes and back.

    Attributes:
        data_type: the precision that configs, plans and archives name.
        code: the number that the compiled loops take (``_row.h``); never written to a file.
        element_bits: bits of an element in the row; hardware profiles are measured by it.
        lead_bytes: bytes before the first element: an integer row's scale and bias.
        column_unit: columns that a column-wise piece must start and end on.
        fbgemm: the name of FBGEMM's ``SparseType``; None: FBGEMM has no such rows, so recinfer's own loop looks them up.
        narrower: the precision to try where these rows are too large; None: there is none.
        limit: the end of the format's range, for messages.
    """

    data_type: DataType
    code: int
    element_bits: int
    fbgemm: str | None
    narrower: DataType | None
    limit: str = ""
    lead_bytes: int = 0
    column_unit: int = 1

    @property
    def name(self) -> str:
        """The name in plans' options and in manifests: ``"int8"``."""
        return self.data_type.value.lower()

    @property
    def columns_per_byte(self) -> int:
        """How many columns share one byte: 1, or 2 for INT4 and 4 for INT2. Slices at multiples of it are byte slices."""
        return max(1, 8 // self.element_bits)

    def padded_dim(self, dim: int) -> int:
        """``dim`` rounded up to whole bytes: the operator addresses INT4 and INT2 rows by whole bytes of codes."""
        return -(-dim // self.columns_per_byte) * self.columns_per_byte

    def row_bytes(self, dim: Any, row_alignment: int = 1) -> Any:
        """Bytes of one packed row of ``dim`` columns, an int or an integer array; ``row_alignment`` is 1 on CPU and 16 on
        CUDA."""
        size = self.lead_bytes - (-dim * self.element_bits // 8)
        return -(-size // row_alignment) * row_alignment

    def check(self, weight_RD: Tensor, table: str, first_row: int) -> None:
        """Raise InputError for rows that are not finite, or that exceed the format's range; names table, row and column."""
        good_R = torch.isfinite(weight_RD).all(dim=1) & self.fits(weight_RD)
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
            f"{self.data_type.value} ({self.limit}); clip the row or use FP32"
        )

    @abstractmethod
    def fits(self, weight_RD: Tensor) -> Tensor:
        """Whether each row of finite weights is in the format's range, bool [R]."""

    @abstractmethod
    def scratch(self, rows: int) -> Any:
        """Memory that :meth:`pack` needs for up to ``rows`` rows, to be created once."""

    @abstractmethod
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
        """Write float32 rows as packed rows, without padding.

        Args:
            weight_RD: contiguous, on the CPU.
            out_RP: uint8 [R, row_bytes(D)]; bytes of a row are adjacent.
            error: gets the sum of the squared weights and, with ``measure``, the rest.
            table, first_row: for messages.

        Raises:
            InputError: as :meth:`check`.
        """

    @abstractmethod
    def unpack(self, packed_RP: Tensor, dim: int) -> Tensor:
        """Packed rows [R, >= row bytes] as float32 [R, dim], in plain torch."""

    @abstractmethod
    def reference_pack(self, weight_RD: Tensor) -> Tensor:
        """Finite float rows packed in plain torch, for tests: bit-identical to :meth:`pack`."""

    @abstractmethod
    def step(self, packed_RP: Tensor) -> Tensor:
        """The scale of every row, float32 [R]; zeros without scales."""

    @abstractmethod
    def rounding_bound(self, vectors_RD: Tensor) -> Tensor:
        """Largest rounding error of the elements of whole rows, which are the float ones or the stored ones; broadcasts to
        ``vectors_RD``."""

    @abstractmethod
    def slice_columns(self, packed_RP: Tensor, dim: int, start: int, stop: int, out_RP: Tensor) -> None:
        """Write columns ``start:stop`` of packed rows to the zeroed rows ``out_RP``."""

    @abstractmethod
    def join_columns(
        self, pieces: Sequence[tuple[int, int, Tensor]], dim: int, out_RP: Tensor, *, table: str, first_row: int
    ) -> None:
        """Write column pieces (start, stop, packed rows), which cover ``dim`` columns in order, to the zeroed rows ``out_RP``.

        Raises:
            InputError: the pieces are not slices of the same rows.
        """
