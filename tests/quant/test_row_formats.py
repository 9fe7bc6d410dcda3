"""Row formats: one object for each precision, whose facts the compiled loops and all other code share."""

from __future__ import annotations

import numpy as np
import pytest

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant import _tables as tables
from recinfer.quant.bags import BagPlaces
from recinfer.quant.formats.names import PRECISIONS
from recinfer.quant.formats.registry import ROW_FORMATS, row_format, row_format_of_code
from recinfer.quant.formats.row_format import RowFormat

EXPECTED_BYTES = {"int8": lambda d: 4 + d, "int4": lambda d: 4 + -(-d // 2), "int2": lambda d: 4 + -(-d // 4)} | {
    "fp16": lambda d: 2 * d,
    "bf16": lambda d: 2 * d,
    "fp32": lambda d: 4 * d,
}
formats = pytest.mark.parametrize("rows", ROW_FORMATS, ids=lambda rows: rows.name)


def test_names_and_codes_are_those_of_the_registry() -> None:
    assert tuple(rows.name for rows in ROW_FORMATS) == PRECISIONS
    assert len({rows.code for rows in ROW_FORMATS}) == len(ROW_FORMATS)
    for rows in ROW_FORMATS:
        assert row_format(rows.data_type) is row_format_of_code(rows.code) is rows
        assert rows.name == rows.data_type.value.lower()


def test_other_precisions_and_codes_have_no_format() -> None:
    with pytest.raises(ConfigError, match="no packed layout for INT64; expected one of INT8"):
        row_format(DataType.INT64)
    with pytest.raises(ConfigError, match="no row format has the code 99"):
        row_format_of_code(99)


@formats
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 64, 130])
def test_bytes_of_a_row(rows: RowFormat, dim: int) -> None:
    size = EXPECTED_BYTES[rows.name](dim)
    assert rows.row_bytes(dim) == size
    assert rows.row_bytes(dim, 16) == -(-size // 16) * 16
    assert rows.row_bytes(np.array([dim, dim + 1])).tolist() == [size, EXPECTED_BYTES[rows.name](dim + 1)]


@formats
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 131])
def test_the_compiled_loops_have_the_same_size(rows: RowFormat, dim: int) -> None:
    """A piece whose rows are one byte shorter is refused."""
    buffer, nothing = np.zeros(rows.row_bytes(dim), np.uint8), BagPlaces(0, 4, 0, True, 1, 1)

    def pool(row_bytes: int) -> bytes:
        piece = np.array([(0, 1, row_bytes, dim, rows.code, 0)], np.int64)
        found: bytes = tables.pool(buffer, piece, np.array([(0, 0, 0)], np.int64), bytes(4), nothing, dim, b"")
        return found

    assert pool(rows.row_bytes(dim)) == bytes(4 * dim)
    with pytest.raises(ValueError, match="places outside the buffer"):
        pool(rows.row_bytes(dim) - 1)


def test_the_compiled_loops_refuse_codes_without_a_format() -> None:
    for code in (0, max(rows.code for rows in ROW_FORMATS) + 1):
        piece = np.array([(0, 1, 64, 8, code, 0)], np.int64)
        with pytest.raises(ValueError, match="places outside the buffer"):
            tables.pool(
                np.zeros(64, np.uint8), piece, np.array([(0, 0, 0)]), bytes(4), BagPlaces(0, 4, 0, True, 1, 1), 8, b""
            )


@formats
def test_the_next_narrower_format_has_smaller_rows(rows: RowFormat) -> None:
    if rows.narrower is None:
        assert rows.row_bytes(64) == min(other.row_bytes(64) for other in ROW_FORMATS)
    else:
        assert row_format(rows.narrower).row_bytes(64) < rows.row_bytes(64)
