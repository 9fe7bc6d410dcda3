"""The names of the row formats, for programs that list them before torch is loaded."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["PRECISIONS", "Precision"]

Precision = Literal["int8", "int4", "int2", "fp16", "bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""Names of the precisions a table can be stored in, those of :data:`recinfer.quant.formats.registry.ROW_FORMATS`."""
