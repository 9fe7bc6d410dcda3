"""Imports a package's names on first use (PEP 562), so that importing the package is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package that exports names of other modules.

    Args:
        package: ``__name__`` of the package.
        homes: name -> module that defines it.
        modules: submodules that are imported when they are named, as in ``recinfer.distributed`` after
            ``import recinfer``.
    """

    def get(name: str) -> Any:
        if name in homes:
            try:
                value = getattr(importlib.import_module(homes[name]), name)
            except ModuleNotFoundError as error:
                if error.name == "torch":
                    hint = "install it with: pip install 'recinfer[cpu]' or 'recinfer[cuda]'"
                    error.msg = f"{package}.{name} needs the package 'torch'; {hint}"
                raise
            setattr(sys.modules[package], name, value)  # found directly from now on
            return value
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        found = vars(sys.modules[package]).items()
        # A package that lists its public modules shows only these, independent of what was imported meanwhile.
        own = (n for n, value in found if n[:2] == "__" or (isinstance(value, ModuleType) and not modules))
        return sorted({*own, *homes, *modules})

    return get, names
