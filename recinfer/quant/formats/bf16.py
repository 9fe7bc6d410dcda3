"""BF16 rows: the upper half of each float32 element, rounded to the nearest, halves to even, as torch rounds.

FBGEMM has no such rows for inference, so recinfer's own loops look them up: on the CPU the compiled one, on a GPU Triton's.
"""

from __future__ import annotations

from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.floats import FloatRows

__all__ = ["BF16"]

BF16 = FloatRows(
    data_type=DataType.BF16,
    code=6,
    element_bits=16,
    fbgemm=None,
    narrower=DataType.INT8,
    limit="bf16 ends at 3.39e38",
    rounding=2**-8 + 2e-6,  # half a unit of the last place, and the rounding of a float32 sum
)
