"""Sizes in bytes as text with the unit that fits them, for messages and tables."""

from __future__ import annotations

import math

__all__ = ["exact_size", "round_up_to_printed", "size_text"]

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DIGITS = 3  # after the point, of an exact size


def _unit(num_bytes: float) -> tuple[str, int]:
    """The largest unit that the size has one of; of less than 1,024 bytes, bytes."""
    return next(((name, size) for name, size in _UNITS.items() if abs(num_bytes) >= size), ("bytes", 1))


def size_text(num_bytes: float) -> str:
    """For a table or a summary: ``1572864`` as ``"1.5 MiB"``, ``80`` as ``"80 bytes"``."""
    name, size = _unit(num_bytes)
    return f"{int(num_bytes)} bytes" if size == 1 else f"{num_bytes / size:,.1f} {name}"


def exact_size(num_bytes: float) -> str:
    """For a message that compares sizes: ``67584`` as ``"66.000 KiB (67584 bytes)"``, ``80`` as ``"80 bytes"``."""
    name, size = _unit(num_bytes)
    exact = f"{int(num_bytes)} bytes"
    return exact if size == 1 else f"{num_bytes / size:,.{_DIGITS}f} {name} ({exact})"


def round_up_to_printed(num_bytes: float) -> int:
    """``num_bytes`` rounded up to what :func:`exact_size` prints, so that the printed size is enough."""
    step = max(_unit(num_bytes)[1] / 10**_DIGITS, 1)
    return math.ceil(math.ceil(num_bytes / step) * step)
