"""Registers FBGEMM's operators with torch on import, if FBGEMM is installed."""

from __future__ import annotations

from recinfer.errors import UnavailableError

__all__ = ["HAS_CUDA", "INSTALLED"]

try:
    import fbgemm_gpu  # registers the operators
except ImportError:
    INSTALLED = HAS_CUDA = False
except OSError as error:
    raise UnavailableError(
        f"FBGEMM cannot be loaded: {error}. Its CUDA build needs NVIDIA's driver (libnvidia-ml.so.1): run it on a host with a "
        "GPU, in a container with NVIDIA's runtime, or install recinfer[cpu]"
    ) from None
else:
    INSTALLED = True
    HAS_CUDA = getattr(fbgemm_gpu, "__variant__", "") != "cpu"  # the package fbgemm-gpu-cpu has operators for CPU alone
