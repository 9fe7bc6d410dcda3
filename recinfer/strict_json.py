"""Reads untrusted JSON strictly into frozen dataclasses: bounded size and depth, no unknown or duplicate keys.

The rules in errors are those of recinfer/archive/FORMAT.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from recinfer.errors import ArchiveError, ConfigError
from recinfer.excerpts import excerpt

__all__ = ["MAX_DEPTH", "MAX_JSON_BYTES", "build", "loads", "raising_config_error"]

MAX_JSON_BYTES = 64 << 20
MAX_DEPTH = 32

T = TypeVar("T")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"')


def loads(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``data``; ``what`` names it in errors.

    Raises:
        ArchiveError: rules J1 (size, encoding) and J2 (not an object, too deep, a key twice, NaN, ...).
    """
    if len(data) > MAX_JSON_BYTES:
        raise ArchiveError(f"{what} has {len(data)} bytes; expected at most {MAX_JSON_BYTES}", rule="J1")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArchiveError(f"{what} is not UTF-8: {error}", rule="J1") from None
    if text.startswith("\ufeff"):
        raise ArchiveError(f"{what} begins with a byte order mark; expected plain UTF-8", rule="J1")
    _check_depth(text, what)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        if "\\" in text:  # only an escape can contain a lone surrogate
            _check_surrogates(value)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{what} is not acceptable JSON: {excerpt(str(error), 200)}", rule="J2") from None
    if not isinstance(value, dict):
        raise ArchiveError(f"{what} holds a {type(value).__name__}; expected one JSON object", rule="J2")
    return value


def build(cls: type[T], value: Any, where: str) -> T:
    """The dataclass ``cls`` from parsed JSON, whose keys and types must match exactly; fields with a default are
    optional.

    Raises:
        ArchiveError: rule J3, naming the place (``manifest.tables[3].rows``), what came and what was expected.
    """
    return _build(cls, value, where)


@contextmanager
def raising_config_error() -> Iterator[None]:
    """Raise ConfigError, without the rule, for an ArchiveError of the block, whose JSON is no part of an archive."""
    try:
        yield
    except ArchiveError as error:
        raise ConfigError(str(error).removeprefix(f"[{error.rule}] ")) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is out of the range of float64")
    return number


def _check_depth(text: str, what: str) -> None:
    """Rejects deep nesting before the parser recurses into it."""
    brackets = re.sub(r"[^][{}]+", "", _STRING.sub("", text)).encode()
    steps = np.where(np.isin(np.frombuffer(brackets, np.uint8), np.frombuffer(b"[{", np.uint8)), 1, -1)
    if steps.size and int(np.cumsum(steps).max()) > MAX_DEPTH:
        raise ArchiveError(f"{what} is nested deeper than {MAX_DEPTH} levels", rule="J2")


def _check_surrogates(value: Any) -> None:
    if isinstance(value, str):
        value.encode("utf-8")  # UnicodeEncodeError is a ValueError
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode("utf-8")
            _check_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _check_surrogates(item)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _wrong(where: str, value: Any, expected: str) -> ArchiveError:
    came = repr(value)
    return ArchiveError(
        f"{where}: got {came if len(came) <= 80 else came[:77] + '...'}; expected {expected}", rule="J3"
    )


def _build(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _build_union(kind, value, where)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _wrong(where, value, " or ".join(map(repr, get_args(kind))))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        item, *others = get_args(kind)
        if others != [...] and len(value) != 1 + len(others):
            raise _wrong(where, value, f"a list of {1 + len(others)}")
        if set(map(type, value)) == {item}:  # plans have a million numbers
            return tuple(value)
        return tuple(_build(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        name, item = get_args(kind)
        if name is int and not all(key.isascii() and key.isdecimal() for key in value):
            raise _wrong(where, list(value), "whole numbers as keys")
        if item is Any:
            return value
        return {name(key): _build(item, entry, f"{where}.{key}") for key, entry in value.items()}
    return _build_scalar(kind, value, where)


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    hints = _hints(kind)
    fields = dataclasses.fields(kind)
    optional = {
        field.name
        for field in fields
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    names = [field.name for field in fields if field.name in value or field.name not in optional]
    if value.keys() != set(names):
        missing, unknown = [n for n in names if n not in value], [k for k in value if k not in hints]
        raise ArchiveError(
            f"{where}: "
            + "; ".join(f"{word} {keys[:5]}" for word, keys in (("missing", missing), ("unknown", unknown)) if keys)
            + f"; expected exactly the keys {names}",
            rule="J3",
        )
    return kind(**{name: _build(hints[name], value[name], f"{where}.{name}") for name in names})


def _build_union(kind: Any, value: Any, where: str) -> Any:
    options = get_args(kind)
    if value is None and type(None) in options:
        return None
    first, *others = (option for option in options if option is not type(None))
    try:
        return _build(first, value, where)
    except ArchiveError:  # the error to raise; a variable of it would make a cycle, which keeps what callers hold
        for option in others:
            with suppress(ArchiveError):
                return _build(option, value, where)
        raise


def _build_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        if abs(value) > 2**1000:
            raise _wrong(where, value, "a number within float64")
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:  # bool is not int here
        raise _wrong(
            where,
            value,
            {str: "text", Path: "a path", int: "an integer", float: "a number", bool: "true or false"}[kind],
        )
    return value
