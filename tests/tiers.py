"""The tier of each test: pure, in_process, archives, ranks or processes, by what the test and its fixtures reach.

A test is in the last tier that its code reaches: its own function, the fixtures that it asks for, and the functions and
classes of ``tests`` that these call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["TIERS", "tier_of"]

TIERS = ("pure", "in_process", "archives", "ranks", "processes")
"""From the fastest to the slowest: without torch; with torch; a model is trained or exported, or a server runs in this
process; process groups; programs as processes."""

_RANKS = frozenset({"tests.distributed.spawn"})
_PROCESSES = frozenset(
    {
        "concurrent.futures.process",
        "multiprocessing",
        "recinfer.training.launch",
        "subprocess",
        "tests.warm",
        "tests.warm_shell",
    }
)
_IMPORTED_LATE = _RANKS | _PROCESSES
_ARCHIVES = frozenset(
    {
        "benchmarks",
        "recinfer.api",
        "recinfer.archive.cut",
        "recinfer.archive.dense",
        "recinfer.inference.export",
        "recinfer.serving.app",
        "recinfer.serving.server",
        "recinfer.serving.workers",
        "recinfer.training.job",
        "recinfer.training.loop",
        "tests.archive.conftest",
        "tests.e2e",
        "tests.inference.conftest",
        "tests.serving.conftest",
        "typer",
    }
)
_IN_PROCESS = frozenset({"grpc", "onnxruntime", "torch"})


def tier_of(item: pytest.Item) -> str:
    """The tier of a collected test."""
    if not isinstance(item, pytest.Function):
        return "processes"  # no function to read
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions: list[Any] = [item.function, *(one.func for found in fixtures for one in found)]
    return TIERS[max(_reached(inspect.unwrap(function)) for function in functions)]


@functools.cache
def _reached(function: Callable[..., Any]) -> int:
    """The position in TIERS of the last tier that ``function`` reaches."""
    found, todo, seen = 0, [function], set[int]()
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for value in _named(current):
            module = _module_of(value)
            found = max(found, _tier_of_module(module))
            if module.startswith("tests.") and module not in _RANKS:
                todo += _functions_of(value)
    return found


def _named(function: Callable[..., Any]) -> Iterator[Any]:
    """The globals that the code of ``function`` names, and the attributes of modules among them."""
    if not isinstance(function, FunctionType):
        return
    names = set(_names(function.__code__))
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for value in values:
        yield value
        if isinstance(value, ModuleType) and value.__name__.startswith("tests."):
            yield from (vars(value)[name] for name in names if name in vars(value))
        elif isinstance(value, ModuleType) and value.__name__ == "recinfer":
            yield from (getattr(value, name) for name in names if name in value.__all__)
    # Imports within a function.
    yield from (sys.modules[name] for name in names if name in _IMPORTED_LATE and name in sys.modules)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _functions_of(value: Any) -> list[Any]:
    if isinstance(value, type):
        members = (
            getattr(member, "fget", None) or getattr(member, "__func__", member) for member in vars(value).values()
        )
        return [inspect.unwrap(member) for member in members if callable(member)]
    if isinstance(value, functools.partial):
        return [value.func]
    return [inspect.unwrap(value)] if callable(value) else []


def _module_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__module__", None) or ""


@functools.cache
def _tier_of_module(name: str) -> int:
    if _in(name, _PROCESSES):
        return TIERS.index("processes")
    if _in(name, _RANKS):
        return TIERS.index("ranks")
    if _in(name, _ARCHIVES):
        return TIERS.index("archives")
    if _in(name, _IN_PROCESS) or name.startswith("recinfer."):
        return TIERS.index("in_process")
    return 0


def _in(name: str, modules: frozenset[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
