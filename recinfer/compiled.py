"""Lists the compiled modules, which setup.py builds, and checks that they exist."""

from __future__ import annotations

import importlib.machinery
import os

__all__ = ["COMPILED", "check_compiled"]

COMPILED = (
    "optim/_adagrad",
    "quant/_rows",
    "quant/_tables",
    "serving/shards/_ranks",
    "serving/wire/_wire",
    "vocabulary/_index",
    "vocabulary/_strings",
)
"""Paths inside the package, without suffix, of the sources and the modules built from them."""


def check_compiled() -> None:
    """Raise an error with instructions if a compiled module is missing, as in a source tree that was not built.

    Raises:
        ImportError: a compiled module is missing; the message gives the command to build it.
    """
    folder = os.path.dirname(__file__)
    for name in COMPILED:
        path = os.path.join(folder, name)
        if not any(os.path.exists(path + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            root = os.path.dirname(folder)
            raise ImportError(
                f"recinfer in {root} is a source tree that was not built ({name}.c is not compiled): run `pip install -e .` "
                "there, or `make install`; that needs a C compiler and Python's headers."
            )
