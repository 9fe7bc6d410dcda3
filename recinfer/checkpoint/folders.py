"""Gives a folder that has been written its name, so that a whole one has it at every moment."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

__all__ = ["exchange", "put", "sync_folder"]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_LIBC = ctypes.CDLL(None) if os.name == "posix" else None


def put(partial: Path, target: Path) -> None:
    """Give ``partial`` the name ``target``; a folder that has it changes places with it, and then goes.

    Where the system cannot exchange names in one step, the old folder steps aside first (``.<name>.old``).
    """
    if not target.exists():
        os.rename(partial, target)
    elif exchange(partial, target):
        shutil.rmtree(partial, ignore_errors=True)
    else:
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        try:
            os.rename(partial, target)
        except BaseException:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(target.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    function = getattr(_LIBC, "renameat2", None)
    if function is None:
        return False
    return function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk, where folders can be synced."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # a file system that knows no such thing
    finally:
        os.close(descriptor)
