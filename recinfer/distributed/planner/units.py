"""Units of the planner, and the small functions of TorchRec's ``planner.utils``."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = [
    "bytes_to_gb",
    "bytes_to_mb",
    "gb_to_bytes",
    "prod",
]


def bytes_to_gb(num_bytes: float) -> float:
    """Convert bytes to GiB."""
    return float(num_bytes) / 1024**3


def bytes_to_mb(num_bytes: float) -> float:
    """Convert bytes to MiB."""
    return float(num_bytes) / 1024**2


def gb_to_bytes(gb: float) -> int:
    """Convert GiB to bytes."""
    return int(gb * 1024**3)


def prod(iterable: Iterable[int]) -> int:
    """Product of the factors."""
    return math.prod(iterable)
