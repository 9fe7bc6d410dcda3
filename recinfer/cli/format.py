"""Formats sizes and times for tables."""

from __future__ import annotations

__all__ = ["mebibytes", "milliseconds"]


def mebibytes(num_bytes: int) -> str:
    """``1536000`` as ``"1.5 MiB"``; less than 1 MiB in KiB."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def milliseconds(seconds: float) -> str:
    """``0.00123`` as ``"1.23 ms"``."""
    return f"{seconds * 1e3:.2f} ms"
