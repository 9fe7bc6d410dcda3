"""FBGEMM's operators: registered with torch by importing this, where FBGEMM is installed."""

from __future__ import annotations

__all__ = ["INSTALLED"]

try:
    import fbgemm_gpu  # noqa: F401  registers the ops
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True
