"""Cuts of tables: rows evenly or in proportion to memory, columns into pieces of equal width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.registry import find_row_format

__all__ = ["column_unit", "column_width", "even_rows", "grid", "heights_in_proportion"]


def even_rows(rows: Any, parts: Any, index: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row and height of piece number ``index`` of ``parts``.

    Pieces have ``ceil(rows / parts)`` rows, and the last pieces may have fewer. Arguments are integers or integer
    arrays.
    """
    height = -(-rows // parts)
    start = np.minimum(index * height, rows)
    return start, np.minimum(height, rows - start)


def heights_in_proportion(rows: int, weights: Sequence[int]) -> list[int]:
    """Divide rows in proportion to weights; each piece differs from its exact share by less than one row.

    Raises:
        ConfigError: weights whose sum is 0 or less.
    """
    total = sum(weights)
    if total <= 0:
        raise ConfigError(f"memory sizes {list(weights)} sum to {total}; expected more than 0")
    edges = [
        rows * weight // total for weight in accumulate(weights)
    ]  # Python integers: the products have up to 80 bits
    return [stop - start for start, stop in pairwise([0, *edges])]


def column_unit(precision: DataType) -> int:
    """Columns that a column-wise piece must start and end on: 4 for INT4 and INT2 (whole bytes), else 1."""
    rows = find_row_format(precision)
    return 1 if rows is None else rows.column_unit  # float tables of other types are cut anywhere


def column_width(cols: int, least: int) -> int:
    """The smallest divisor of ``cols`` that is at least ``least`` and a multiple of 4, as TorchRec's and as whole bytes of
    INT2 need it; ``cols`` when there is none."""
    first = -(-least // 4) * 4
    return next((width for width in range(first, cols, 4) if cols % width == 0), cols)


def grid(heights: Sequence[int], widths: Sequence[int], ranks: Sequence[int]) -> list[Rect]:
    """A table cut into strips of ``widths``, each cut into ``heights``.

    Args:
        ranks: ranks of the rectangles, strip after strip, each from top to bottom.
    """
    cells = [
        (top, bottom, left, right)
        for left, right in pairwise([0, *accumulate(widths)])
        for top, bottom in pairwise([0, *accumulate(heights)])
    ]
    return [Rect(rank, *cell) for rank, cell in zip(ranks, cells, strict=True)]
