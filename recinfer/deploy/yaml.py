"""Writes plain data as deterministic YAML text without a YAML library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Expression", "to_yaml"]

# Plain where no YAML 1.1 or 1.2 reader sees anything but text in it; all else is quoted as JSON does, which YAML reads.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*\Z")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


class Expression(str):
    """Text of a template, written as it is. Where it begins with ``{{-``, its lines take the place of the entry of a
    mapping, whose key is not written, or of an item."""

    __slots__ = ()

    @property
    def is_block(self) -> bool:
        """Whether its lines take the place of an entry."""
        return self.startswith("{{-")


def to_yaml(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """``data`` as one YAML document; mappings, lists, text, numbers and booleans, empty values only as ``{}`` and
    ``[]``."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(value, Expression) and value.is_block:
                yield from value.splitlines()
            else:
                yield from _entry(f"{_scalar(key)}:", value)
    else:
        for item in data:
            if isinstance(item, Expression) and item.is_block:
                yield from item.splitlines()
            elif isinstance(item, Mapping) and item:
                first, *others = _lines(item)
                yield f"- {first}"
                yield from (f"  {line}" for line in others)
            else:
                yield f"- {_inline(item)}"


def _entry(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield key
        yield from (f"  {line}" for line in _lines(value))
    elif isinstance(value, str) and value.endswith("\n") and not value.startswith((" ", "\n")):
        yield f"{key} |"
        yield from (f"  {line}" for line in value.removesuffix("\n").split("\n"))
    else:
        yield f"{key} {_inline(value)}"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        assert not value, "cannot write a mapping inside a list on one line"
        return "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, Expression):
        return str(value)
    if isinstance(value, str) and _PLAIN.match(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
