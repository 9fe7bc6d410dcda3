"""Every name that TorchRec documents under ``torchrec.distributed`` is here, at its place, with its parameters and members.

``documented_api.json`` is the list, by our names: parameters in order (``*args`` for any), members of classes with the
parameters of methods (null for attributes). More parameters and members than documented are fine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
DOCUMENTED: dict[str, dict[str, Any]] = json.loads((TESTS / "documented_api.json").read_text())


def parameters(function: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]


def check_parameters(what: str, function: Any, documented: list[str]) -> None:
    """The documented ones, by name and in this order, among what the function takes."""
    wanted = [name for name in documented if not name.startswith("*")]
    if not wanted:
        return
    taken = parameters(function)
    names = [p.name for p in taken]
    found = [name for name in names if name in wanted]
    assert found == wanted, f"{what}: documented {wanted}; it takes {names}"
    for parameter in taken:
        extra = parameter.name not in wanted and parameter.default is inspect.Parameter.empty
        variable = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        assert variable or not extra, f"{what}: needs {parameter.name}, which is not documented"


def member(cls: type, name: str) -> Any:
    """A class's member, or None for one that only instances have (and the class declares)."""
    if hasattr(cls, name):
        return inspect.getattr_static(cls, name)
    declared = any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__)
    assert declared, f"{cls.__name__} has no member {name}"
    return None


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_name(name: str) -> None:
    module, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(module), short)
    entry = DOCUMENTED[name]
    assert found.__doc__, f"{name} has no docstring"
    if not (inspect.isclass(found) and issubclass(found, Enum)):
        check_parameters(name, found, entry["params"])
    for member_name, documented in entry.get("members", {}).items():
        function = member(found, member_name)
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if documented is not None and callable(function):
            check_parameters(f"{name}.{member_name}", function, documented)


@functools.cache
def words_of_tests() -> frozenset[str]:
    sources = [path.read_text() for path in TESTS.rglob("*.py")]
    return frozenset(word for source in sources for word in re.findall(r"\w+", source))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_name_is_exercised(name: str) -> None:
    """A weak guard against a name that is only imported: some test speaks of it."""
    assert (name.rpartition(".")[2] in words_of_tests()) is True, f"no test speaks of {name}"


def test_the_list_is_whole() -> None:
    assert len(DOCUMENTED) == 169
