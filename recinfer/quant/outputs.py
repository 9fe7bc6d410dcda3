"""Reuses the output buffers of lookups."""

from __future__ import annotations

import ctypes

from recinfer.errors import ConfigError

__all__ = ["keep_outputs"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # constants of glibc's malloc.h
_MOST = (1 << 31) - 1  # mallopt takes an int


def keep_outputs(max_bytes: int = _MOST) -> bool:
    """Let the process's allocator reuse freed tensors of up to ``max_bytes`` bytes from now on.

    FBGEMM's operator has no output argument, so a buffer cannot be passed to it, but its memory can be reused. glibc
    maps every allocation above 32 MiB anew and the kernel clears it page by page, which takes longer than the lookup.
    After this call freed outputs stay on the heap, and after about ten calls of a size later outputs reuse the memory
    of earlier ones. The process then holds several times its largest output. Threads that start later share one heap,
    because separate heaps are unmapped when they are empty, which is after each call. So call this before threads
    start.

    Returns:
        whether the C library accepted the settings; False if it is not glibc.

    Raises:
        ConfigError: ``max_bytes`` is not one that malloc takes.
    """
    if not 0 < max_bytes <= _MOST:
        raise ConfigError(f"max_bytes is {max_bytes}; expected 1 to {_MOST}")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, max_bytes), (_M_TRIM_THRESHOLD, _MOST), (_M_ARENA_MAX, 1))
    return all([bool(mallopt(*setting)) for setting in settings])
