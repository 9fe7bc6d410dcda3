"""Checks that the compiled modules of a source tree were built."""

from __future__ import annotations

import importlib.machinery
import os
from glob import glob

__all__ = ["check_compiled"]


def check_compiled() -> None:
    """Raise an error with instructions if a source tree has a C source that was not compiled.

    Raises:
        ImportError: a compiled module is missing; the message gives the command to build it.
    """
    folder = os.path.dirname(__file__)
    root = os.path.dirname(folder)
    if not os.path.exists(os.path.join(root, "setup.py")):
        return  # an installed package, which is built as a whole
    # setup.py makes a module of each source file. Two levels: a search of the whole tree takes 10 ms of each import.
    for source in sorted(glob(os.path.join(folder, "*", "_*.c")) + glob(os.path.join(folder, "*", "*", "_*.c"))):
        path = source.removesuffix(".c")
        if not any(os.path.exists(path + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            raise ImportError(
                f"recinfer in {root} is a source tree that was not built ({os.path.relpath(source, folder)} is not compiled): run "
                "`pip install -e .` there, or `make install`; that needs a C compiler and Python's headers."
            )
