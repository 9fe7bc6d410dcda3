"""The compiled modules of the package, and the check that they are there: setup.py builds them."""

from __future__ import annotations

import importlib.machinery
import os

__all__ = ["COMPILED", "check_compiled"]

COMPILED = ("quant/_rows", "quant/_tables", "serving/shards/_ranks", "serving/wire/_wire")
"""Paths inside the package, without suffix: of the sources and of what is built from them."""


def check_compiled() -> None:
    """Look for what is compiled, so that a source tree that was never built says so at its import.

    Raises:
        ImportError: something is not there; the message says what to run.
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
