"""Registers FBGEMM's operators with torch on import, if FBGEMM is installed."""

from __future__ import annotations

__all__ = ["HAS_CUDA", "INSTALLED"]

try:
    import fbgemm_gpu  # registers the operators
except ImportError:
    INSTALLED = HAS_CUDA = False
else:
    INSTALLED = True
    HAS_CUDA = getattr(fbgemm_gpu, "__variant__", "") != "cpu"  # the package fbgemm-gpu-cpu has operators for CPU alone
