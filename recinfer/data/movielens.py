"""Reads MovieLens ratings in RecBole's format: ``.inter`` files joined with the ``.user`` and ``.item`` files next to
them.

The files are tab-separated; their header names each column as ``name:type``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.data.columns import Columns, column, to_numbers
from recinfer.data.contract import DenseFeature, FeatureContract, Hash, Label, SparseFeature
from recinfer.data.fitting import standardized, vocabulary
from recinfer.data.tables import read_csv
from recinfer.errors import InputError
from recinfer.files import without_gz

__all__ = [
    "RATING_THRESHOLD",
    "SideTable",
    "join_sides",
    "movielens_contract",
    "read_atomic",
    "read_movielens",
    "read_sides",
    "strip_types",
]

RATING_THRESHOLD = 4.0
"""Ratings of at least this value have the label 1."""

_SIDES = ((".user", "user_id"), (".item", "item_id"))
_TITLE_BUCKETS = 4096
_ZIP_BUCKETS = 1024


def read_atomic(path: str | os.PathLike[str], limit: int | None = None) -> dict[str, NDArray[Any]]:
    """A file of RecBole as text columns, without the types in their names.

    Raises:
        InputError: a header without ``name:type``, or rows that do not fit it; names path and line.
        OSError: the file cannot be opened.
    """
    return strip_types(read_csv(path, "\t", limit), path)


def strip_types(columns: dict[str, NDArray[Any]], path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Columns ``name:type`` as ``name``; raises InputError, naming ``path``, for one without a type."""
    odd = [name for name in columns if ":" not in name]
    if odd:
        raise InputError(f"{path}: the header has {odd[0]!r}; expected name:type for each column, as in user_id:token")
    return {name.rpartition(":")[0]: values for name, values in columns.items()}


def read_movielens(path: str | os.PathLike[str], limit: int | None = None) -> dict[str, NDArray[Any]]:
    """The interactions of ``path`` with the columns of their user and item, if files of the same name have them.

    Args:
        path: the ``.inter`` file; ``rating`` may be missing where rows are only to be scored.
        limit: read only the first ``limit`` interactions.

    Returns:
        text by column; ``""`` where a user or item is in no file.

    Raises:
        InputError: no ``user_id`` or ``item_id``, a user or item twice, or files of another form.
        OSError: the file cannot be opened.
    """
    return join_sides(read_atomic(path, limit), read_sides(path), path)


@dataclass(frozen=True)
class SideTable:
    """The columns of a ``.user`` or ``.item`` file.

    Attributes:
        path: the file.
        key: the column it is joined by.
        row_of: key -> row.
        columns: the other columns, with an additional empty row at the end for missing keys.
    """

    path: Path
    key: str
    row_of: dict[str, int]
    columns: dict[str, NDArray[Any]]


def read_sides(path: str | os.PathLike[str]) -> list[SideTable]:
    """The ``.user`` and ``.item`` files next to ``path`` that exist, each also with ``.gz`` behind it."""
    found = []
    for suffix, key in _SIDES:
        plain = without_gz(path).with_suffix(suffix)
        side_path = next((one for one in (plain, plain.with_name(f"{plain.name}.gz")) if one.exists()), None)
        if side_path is None:
            continue
        side = read_atomic(side_path)
        if key not in side:
            raise InputError(f"{side_path}: has no column {key}; it has {', '.join(side)}")
        ids = side.pop(key)
        row_of = {token: at for at, token in enumerate(ids)}
        if len(row_of) != len(ids):
            raise InputError(f"{side_path}: has {len(ids)} rows for {len(row_of)} different {key}; expected each once")
        found.append(SideTable(side_path, key, row_of, {name: np.append(v, "") for name, v in side.items()}))
    return found


def join_sides(
    columns: dict[str, NDArray[Any]], sides: Sequence[SideTable], path: str | os.PathLike[str]
) -> dict[str, NDArray[Any]]:
    """Interactions with the columns of their user and item; ``""`` for a user or item that its file lacks.

    Raises:
        InputError: no ``user_id`` or ``item_id`` in ``path``, or a column that two files have.
    """
    missing = [key for _, key in _SIDES if key not in columns]
    if missing:
        raise InputError(f"{path}: has no column {missing[0]}; it has {', '.join(columns)}")
    joined = dict(columns)
    for side in sides:
        clash = sorted(set(side.columns) & set(joined))
        if clash:
            raise InputError(f"{side.path}: columns {', '.join(clash)} are in another file too; rename them")
        keys = columns[side.key]
        rows = np.fromiter(map(side.row_of.get, keys, repeat(len(side.row_of))), np.int64, len(keys))
        joined |= {name: values[rows] for name, values in side.columns.items()}
    return joined


def movielens_contract(columns: Columns) -> FeatureContract:
    """A contract for MovieLens rows, its vocabularies and scales from ``columns`` (the training rows).

    Other columns than user_id and item_id are left out where the rows lack them. The label is a rating of 4 or 5.

    Raises:
        InputError: no user_id or item_id, or text that is not a number.
    """
    sparse = [SparseFeature(name, vocabulary(columns, name)) for name in ("user_id", "item_id")]
    sparse += [
        SparseFeature(name, vocabulary(columns, name))
        for name in ("gender", "occupation", "age", "release_year")
        if name in columns
    ]
    if "zip_code" in columns:
        sparse.append(SparseFeature("zip_code", Hash(_ZIP_BUCKETS)))
    if "class" in columns:
        sparse.append(SparseFeature("genres", vocabulary(columns, "class", " "), column="class", separator=" "))
    if "movie_title" in columns:
        title = SparseFeature("title", Hash(_TITLE_BUCKETS), column="movie_title", separator=" ")
        sparse.append(title)
    dense = [DenseFeature(name, fill=_mean(columns, name)) for name in ("timestamp", "age") if name in columns]
    return FeatureContract(
        tuple(sparse), tuple(standardized(f, columns) for f in dense), Label("rating", RATING_THRESHOLD)
    )


def _mean(columns: Columns, name: str) -> float:
    values = to_numbers(column(columns, name, "the MovieLens format"), name)
    known = values[~np.isnan(values)]
    return float(np.round(known.mean())) if known.size else 0.0
