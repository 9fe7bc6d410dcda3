"""A cache of archives that many tests need: a process exports one of each kind, and tests get copies of it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["kept"]


def kept(make: Callable[..., Path]) -> Callable[..., Path]:
    """``make``, which writes an archive into a folder, its first argument, by what its others say; they must be hashable."""
    made: dict[Any, tuple[Path, Path]] = {}

    @functools.wraps(make)
    def copy(folder: Path, *args: Any, **kwargs: Any) -> Path:
        key = args, tuple(sorted(kwargs.items()))
        if key not in made:
            home = Path(tempfile.mkdtemp(prefix="recinfer-kept-"))
            atexit.register(shutil.rmtree, home, ignore_errors=True)
            made[key] = home, make(home, *args, **kwargs).relative_to(home)
        home, found = made[key]
        shutil.copytree(home, folder, dirs_exist_ok=True)
        return folder / found

    return copy
