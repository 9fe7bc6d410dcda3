"""Walks the tree of a model by the identity of its modules: each module once, with all its names; names with prefixes.

``nn.Module.named_children`` and ``named_modules`` leave out the second name of a module, so a module that they find must be
replaced, planned or listed under names that they do not give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TypeVar

from torch import nn

__all__ = [
    "append_prefix",
    "filter_state_dict",
    "missing_keys",
    "module_names",
    "named_children",
    "outermost_modules",
]

T = TypeVar("T")


def append_prefix(prefix: str, name: str) -> str:
    """``prefix.name``; just ``name`` after an empty prefix, just ``prefix`` before an empty name."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> OrderedDict[str, T]:
    """The entries under ``name.``, without that prefix."""
    return OrderedDict((key[len(name) + 1 :], value) for key, value in state_dict.items() if key.startswith(f"{name}."))


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, child) for every name of a child: a child with two names comes twice."""
    yield from ((name, child) for name, child in module._modules.items() if child is not None)


def module_names(model: nn.Module) -> dict[int, list[str]]:
    """``id(module)`` -> all paths of each module of ``model``, in the order of its tree; the path of the model is ``""``."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def missing_keys(model: nn.Module, keys: Iterable[str], state: Container[str]) -> list[str]:
    """The ``keys`` of ``model`` that ``state`` holds under no name of their module."""
    several = [paths for paths in module_names(model).values() if len(paths) > 1]

    def held(key: str) -> bool:
        return key in state or any(
            other + key.removeprefix(path) in state
            for paths in several
            for path in paths
            if key.startswith(f"{path}.")
            for other in paths
        )

    return [key for key in keys if not held(key)]


def outermost_modules(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """(first path, module) for each module that is ``wanted``, once, in the order of the tree; children of these are not
    searched. The path of the model is ``""``."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if wanted(module):
            yield path, module
            continue
        prefix = f"{path}." if path else ""
        stack.extend(reversed([(prefix + name, child) for name, child in named_children(module)]))
