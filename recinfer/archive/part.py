"""The base classes of what an id step keeps in an archive and in a delta: entries of their JSON, with files and rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Changes",
    "DeltaPart",
    "Model",
    "Part",
    "PendingChanges",
    "ShownPart",
    "Tensors",
    "by_key",
    "digest",
    "parts_of",
    "without_absent",
]

Tensors = tuple[NDArray[np.int64], ...]
"""The tensors of an entry of a delta, int64 ``[N]`` each, in the order of :meth:`DeltaPart.tensors`."""


class Model(Protocol):
    """The attributes of :class:`recinfer.archive.manifest.Manifest` that rules of parts read."""

    @property
    def tables(self) -> Sequence[Any]: ...
    @property
    def modules(self) -> Sequence[Any]: ...
    @property
    def features(self) -> Sequence[Any]: ...
    @property
    def feature_tables(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def request_features(self) -> Sequence[str]: ...
    @property
    def raw_features(self) -> Collection[str]: ...
    @property
    def parts(self) -> Sequence[Sequence[Part]]: ...


class Part:
    """Base of an entry of ``manifest.json`` that belongs to an id step: a frozen dataclass, whose file the archive has.

    A class of it is the type of one field of :class:`recinfer.archive.id_parts.ManifestParts`, which is absent in JSON where the
    archive has no entry. ``key``: the field's name.
    """

    key: ClassVar[str]

    @classmethod
    def path(cls, number: int) -> str:
        """The archive path of the file of the entry ``number``."""
        raise NotImplementedError

    @classmethod
    def check(cls, entries: Sequence[Self], model: Model) -> None:
        """Raise ArchiveError with the rule that the entries break; rules of the files are checked where a file is opened."""
        raise NotImplementedError

    def raw_features(self, model: Model) -> Collection[str]:
        """The features whose ids in requests are raw, so that no integer of them is a row."""
        return ()

    def string_features(self) -> Mapping[str, Collection[str]]:
        """The features whose ids in requests may be strings, each with some strings as examples."""
        return {}


@dataclass(frozen=True)
class ShownPart:
    """The entries of a part as ``recinfer inspect`` shows them.

    Attributes:
        key: their name in ``--json``.
        entries: plain data for ``--json``; none: the part is not shown.
        title: above their table.
        columns: heading -> a cell per entry.
        numbers: headings of numbers.
    """

    key: str
    entries: list[dict[str, Any]]
    title: str
    columns: dict[str, list[str]]
    numbers: Collection[str]


class DeltaPart:
    """Base of an entry of ``delta.json`` that belongs to an id step: a frozen dataclass, whose tensors the delta has.

    A class of it is the type of one field of :class:`recinfer.archive.id_parts.DeltaParts`, which is absent in JSON where the
    delta has no entry. ``key``: the field's name.
    """

    key: ClassVar[str]

    def tensors(self) -> dict[str, tuple[int, str]]:
        """Name of each tensor -> its length, at least 1, and its SHA-256; the delta has it as ``name/number``."""
        raise NotImplementedError

    @classmethod
    def check(cls, changes: Sequence[tuple[Self, Tensors]]) -> None:
        """Raise ArchiveError with the rule that the entries and their tensors break in themselves."""
        raise NotImplementedError

    def check_fit(self, tensors: Tensors, model: Model) -> None:
        """Raise ArchiveError with the rule by which the entry does not fit the archive."""
        raise NotImplementedError


class Changes(Protocol):
    """The changes of id steps by a delta: a :class:`recinfer.archive.delta.Delta`, or one that is being made."""

    @property
    def parts(self) -> Sequence[tuple[DeltaPart, Tensors]]:
        """The entries of all parts, with their tensors."""
        ...


@dataclass(frozen=True)
class PendingChanges:
    """Changes that no delta has yet."""

    parts: tuple[tuple[DeltaPart, Tensors], ...] = ()


def digest(tensor: NDArray[np.int64]) -> str:
    """SHA-256 of the little-endian bytes, as :meth:`DeltaPart.tensors` gives it."""
    return sha256(tensor.astype("<i8").tobytes()).hexdigest()


P = TypeVar("P", Part, DeltaPart)


def parts_of(holder: Any, kind: type[P]) -> list[tuple[P, ...]]:
    """The entries of each field of ``kind`` of a dataclass that has some, in the order of the fields."""
    values = [getattr(holder, field.name) for field in fields(holder)]
    return [value for value in values if isinstance(value, tuple) and value and isinstance(value[0], kind)]


def without_absent(holder: Any, values: dict[str, Any]) -> dict[str, Any]:
    """``values``, the fields of a dataclass by name, the parts last, and none without entry: older readers reject unknown keys."""
    parts = [field.name for field in fields(holder) if field.default == ()]
    others = {name: value for name, value in values.items() if name not in parts}
    return others | {name: values[name] for name in parts if values[name] != ()}


def by_key(entries: Iterable[Part | DeltaPart]) -> dict[str, Any]:
    """The entries by the field that they belong to."""
    found: dict[str, Any] = {}
    for entry in entries:
        found[entry.key] = (*found.get(entry.key, ()), entry)
    return found
