"""Formats times for tables."""

from __future__ import annotations

__all__ = ["milliseconds"]


def milliseconds(seconds: float) -> str:
    """``0.00123`` as ``"1.23 ms"``."""
    return f"{seconds * 1e3:.2f} ms"
