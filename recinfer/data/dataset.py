"""Loads a dataset: raw columns, their feature contract, and the split into training and held-out rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recinfer.data.contract import FeatureContract
from recinfer.data.criteo import criteo_contract, read_criteo
from recinfer.data.movielens import movielens_contract, read_movielens
from recinfer.data.split import split_rows
from recinfer.data.synthetic import generate_criteo
from recinfer.errors import ConfigError, InputError

__all__ = ["FORMATS", "Dataset", "load_dataset", "read_columns"]

FORMATS = ("criteo", "movielens", "synthetic")
DEFAULT_SYNTHETIC_ROWS = 50_000


@dataclass(frozen=True)
class Dataset:
    """Raw rows with their contract and split.

    Attributes:
        name: name of the data, and of a model trained on it.
        columns: raw values by column, all of one length.
        contract: made from the training rows alone, so held-out rows may hold values it has not seen.
        train, test: int64 row numbers, disjoint.
    """

    name: str
    columns: Mapping[str, NDArray] = field(repr=False)
    contract: FeatureContract = field(repr=False)
    train: NDArray[np.int64] = field(repr=False)
    test: NDArray[np.int64] = field(repr=False)

    @property
    def num_rows(self) -> int:
        """All rows, in the split or not."""
        return len(next(iter(self.columns.values())))

    def take(self, rows: NDArray[np.int64]) -> dict[str, NDArray]:
        """The columns restricted to ``rows``, as ``contract.apply`` takes them."""
        return _take(self.columns, rows)


def load_dataset(
    path: str | os.PathLike[str] | None,
    format: str,
    limit: int | None = None,
    seed: int = 0,
    *,
    test_fraction: float = 0.1,
) -> Dataset:
    """Read or generate rows, hold some out, and fit the feature contract to the others.

    Args:
        path: the rows; None, and only None, for ``synthetic``.
        format: ``"criteo"`` (csv with header, or tsv without), ``"movielens"`` (RecBole's .inter, with .user and .item
            if they are next to it) or ``"synthetic"``.
        limit: use only that many rows, the first of a file; None for all (synthetic: 50,000).
        seed: seed of the split, and of synthetic rows.
        test_fraction: part of the rows to hold out, chosen at random.

    Raises:
        ConfigError: an unknown format, or a path where none is expected or the reverse.
        InputError: rows that cannot be read, or fewer than 2.
        OSError: the file cannot be opened.
    """
    name = format
    if format == "synthetic":
        if path is not None:
            raise ConfigError(
                f"format 'synthetic' generates its rows; got the path {os.fspath(path)!r}, expected none, or the format "
                "of its rows: 'criteo' or 'movielens'"
            )
        columns: Mapping[str, NDArray] = generate_criteo(
            DEFAULT_SYNTHETIC_ROWS if limit is None else limit, seed
        ).columns
    else:
        if path is None:
            raise ConfigError(f"format {format!r} needs a path to the rows (--data); only 'synthetic' generates rows")
        columns = read_columns(path, format, limit)
        name = Path(path).stem
    train, test = split_rows(len(next(iter(columns.values()))), test_fraction=test_fraction, seed=seed)
    fit = movielens_contract if format == "movielens" else criteo_contract
    return Dataset(name, columns, fit(_take(columns, train)), train, test)


def read_columns(path: str | os.PathLike[str], format: str, limit: int | None = None) -> dict[str, NDArray]:
    """The raw rows of a file for the feature contract of a model trained on ``format``, with labels if the file has
    labels.

    Args:
        path: the rows.
        format: ``"criteo"`` or ``"movielens"``.
        limit: read only the first ``limit`` rows.

    Raises:
        ConfigError: another format.
        InputError: rows that cannot be read, or none.
        OSError: the file cannot be opened.
    """
    readers = {"criteo": read_criteo, "movielens": read_movielens}
    if format not in readers:
        raise ConfigError(f"format {format!r}: rows in a file are one of {', '.join(sorted(readers))}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; expected at least 1 row")
    return readers[format](path, limit)


def _take(columns: Mapping[str, NDArray], rows: NDArray[np.int64]) -> dict[str, NDArray]:
    return {name: np.asarray(column)[rows] for name, column in columns.items()}
