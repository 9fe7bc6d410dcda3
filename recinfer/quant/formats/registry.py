"""The row formats by precision and by the number that the compiled loops take."""

from __future__ import annotations

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.bf16 import BF16
from recinfer.quant.formats.floats import FP16, FP32
from recinfer.quant.formats.integers import INT2, INT4, INT8
from recinfer.quant.formats.row_format import RowFormat

__all__ = ["ROW_FORMATS", "find_row_format", "row_format", "row_format_of_code"]

ROW_FORMATS: tuple[RowFormat, ...] = (INT8, INT4, INT2, FP16, BF16, FP32)
"""Every row format, in the order in which messages list them."""

_BY_TYPE = {known.data_type: known for known in ROW_FORMATS}
_BY_CODE = {known.code: known for known in ROW_FORMATS}


def row_format(data_type: DataType) -> RowFormat:
    """The format of a table's rows; raises ConfigError for a precision that tables cannot be stored in."""
    found = _BY_TYPE.get(data_type)
    if found is None:
        names = ", ".join(known.data_type.value for known in ROW_FORMATS)
        raise ConfigError(f"no packed layout for {data_type}; expected one of {names}")
    return found


def find_row_format(data_type: DataType) -> RowFormat | None:
    """The row format of a precision, like :func:`row_format`; None for a precision that only float tables have."""
    return _BY_TYPE.get(data_type)


def row_format_of_code(code: int) -> RowFormat:
    """The format with this ``code``; raises ConfigError for another number."""
    found = _BY_CODE.get(code)
    if found is None:
        raise ConfigError(f"no row format has the code {code}; expected one of {sorted(_BY_CODE)}")
    return found
