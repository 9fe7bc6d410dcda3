"""Reuses the output buffers of lookups."""

from __future__ import annotations

import ctypes

__all__ = ["keep_outputs"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_MOST = (1 << 31) - 1  # mallopt takes an int


def keep_outputs(max_bytes: int = _MOST) -> bool:
    """Let the process's allocator reuse freed tensors of up to ``max_bytes`` bytes from now on.

    FBGEMM's op has no output argument, so a buffer cannot be handed to it; what can be kept is the memory. glibc maps
    anything above 32 MiB anew at each call and the kernel clears it page by page, which takes longer than the lookup
    that fills it. After this call freed outputs stay on the heap, and after some ten calls of a size the next ones fit
    where earlier ones lay. The process then holds several times its largest output. Threads that start later share one heap: those of their own are unmapped when they are
    empty, which is after each call. So call it before threads start.

    Returns:
        whether the C library took the settings; False where it is not glibc.
    """
    if not 0 < max_bytes <= _MOST:
        raise ValueError(f"max_bytes is {max_bytes}; expected 1 to {_MOST}")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, max_bytes), (_M_TRIM_THRESHOLD, _MOST), (_M_ARENA_MAX, 1))
    return all([bool(mallopt(*setting)) for setting in settings])
