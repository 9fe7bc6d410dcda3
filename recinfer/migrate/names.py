"""Checks which names of torchrec the installed recinfer has, and suggests replacements for the others."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from recinfer.migrate.absent import INSTEAD

__all__ = ["instead_of", "is_here"]


@functools.cache
def is_here(name: str) -> bool:
    """Whether recinfer has the object that ``name`` means in torchrec, such as
    ``torchrec.sparse.jagged_tensor.KeyedJaggedTensor``.

    Imports modules as needed. Attributes of classes are checked one level deep.

    Raises:
        ModuleNotFoundError: a module of recinfer needs a package that is not installed.
    """
    path, *parts = ("recinfer" + name.removeprefix("torchrec")).split(".")
    found: object = importlib.import_module(path)
    for part in parts:
        if isinstance(found, type):
            return hasattr(found, part) or any(part in vars(c).get("__annotations__", {}) for c in found.__mro__)
        if not isinstance(found, ModuleType):
            return True
        path = f"{path}.{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path and not path.startswith(f"{error.name}."):
                raise
            return False
    return True


def instead_of(name: str) -> str:
    """The replacement for a missing name, from the entry of the name or of the nearest enclosing class or module."""
    found = INSTEAD.get(name, "")
    while not found and name:
        found = INSTEAD.get(f"{name}.*", "") or INSTEAD.get(name, "")
        name = name.rpartition(".")[0]
    return found
