"""Reads Criteo display-advertising rows: a label, 13 counts ``I1..I13`` and 26 hex tokens ``C1..C26``, any of which may
be empty."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.data.columns import Columns, column, to_text
from recinfer.data.contract import DenseFeature, FeatureContract, Hash, Label, SparseFeature
from recinfer.data.fitting import standardized
from recinfer.data.tables import first_line, read_csv, read_table
from recinfer.errors import InputError

__all__ = ["DENSE", "LABEL", "SPARSE", "criteo_contract", "header_of", "read_criteo"]

LABEL = "label"
DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))

_MIN_BUCKETS = 16


def read_criteo(path: str | os.PathLike[str], limit: int | None = None) -> dict[str, NDArray[Any]]:
    """The rows of a file with a header line (comma or tab), or of the original format (tabs, no header).

    Args:
        path: the file; without a header 40 fields a row, or 39 where the label is missing.
        limit: read only the first ``limit`` rows.

    Returns:
        text by column, ``""`` where a field is empty; ``label`` only if the file has it.

    Raises:
        InputError: rows of another form; names path and line.
        OSError: the file cannot be opened.
    """
    line = first_line(path)
    delimiter = "\t" if "\t" in line else ","
    has_header, names = header_of(path, [field.strip('"') for field in line.split(delimiter)])
    return read_csv(path, delimiter, limit) if has_header else read_table(path, delimiter, names, limit)


def header_of(path: str | os.PathLike[str], fields: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Whether the first line of a file is a header, and the file's column names.

    Raises:
        InputError: neither a name among them nor the number of fields of the original form.
    """
    if set(fields) & {LABEL, *DENSE, *SPARSE}:
        return True, tuple(fields)
    names = (LABEL, *DENSE, *SPARSE)
    if len(fields) not in (len(names), len(names) - 1):
        raise InputError(
            f"{path}: the first line has {len(fields)} fields and no column names; expected a header with "
            f"{LABEL}, {DENSE[0]}.., {SPARSE[0]}.., or {len(names)} fields per row"
        )
    return False, names[-len(fields) :]


def criteo_contract(columns: Columns, *, max_buckets: int = 1 << 20, seed: int = 0) -> FeatureContract:
    """A contract for Criteo rows, sized by ``columns`` (the training rows).

    Counts: negative ones are 0, then log(1 + x), then scaled to mean 0 and variance 1. Tokens: hashed to at least
    twice as many buckets as there are different tokens (a power of two), so that few collide; an empty one is an
    empty bag.

    Args:
        columns: raw rows with I1..I13 and C1..C26.
        max_buckets: bound on the rows of a table.
        seed: seed of the hash.

    Raises:
        InputError: a column is missing, or a count is not a number.
    """
    dense = [standardized(DenseFeature(name, clip_min=0.0, log=True), columns) for name in DENSE]
    sparse = []
    for name in SPARSE:
        distinct = len(set(to_text(column(columns, name, "the Criteo format"), name)) - {""})
        buckets = min(max_buckets, max(_MIN_BUCKETS, 1 << int(np.ceil(np.log2(max(1, 2 * distinct))))))
        sparse.append(SparseFeature(name, Hash(buckets, seed)))
    return FeatureContract(tuple(sparse), tuple(dense), Label(LABEL))
