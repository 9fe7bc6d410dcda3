"""Iterates over MovieLens in GroupLens' format: a folder with ``ratings.csv`` and ``movies.csv``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe

from recinfer.datasets.utils import LoadFiles, ReadLinesFromCSV, safe_cast
from recinfer.errors import InputError

__all__ = [
    "COLUMN_TYPE_CASTERS",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_MOVIES_COLUMN_NAMES",
    "DEFAULT_RATINGS_COLUMN_NAMES",
    "MOVIES_FILENAME",
    "RATINGS_FILENAME",
    "movielens_20m",
    "movielens_25m",
]

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES: list[str] = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES: list[str] = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES: list[str] = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]


def _to_int(text: Any) -> Any:
    return safe_cast(text, int, 0)


def _to_float(text: Any) -> Any:
    return safe_cast(text, float, 0.0)


COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [_to_int, _to_int, _to_float, _to_int, str, str]
"""Converts the text of each of ``DEFAULT_COLUMN_NAMES`` to its value; 0 for text that is not a number."""


def _named(row: list[str]) -> dict[str, Any]:
    return {name: cast(text) for name, cast, text in zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, row)}


class _Ratings(IterDataPipe):
    def __init__(self, root: str, with_movies: bool, row_mapper: Callable[[list[str]], Any] | None, open_kw: Any):
        self.root = Path(root)
        self.with_movies = with_movies
        self.row_mapper = row_mapper
        self.open_kw = open_kw

    def __iter__(self) -> Iterator[Any]:
        movies = {row[0]: row[1:] for row in _rows(self.root / MOVIES_FILENAME)} if self.with_movies else {}
        for row in _rows(self.root / RATINGS_FILENAME, **self.open_kw):
            if self.with_movies:
                if row[1] not in movies:
                    raise InputError(f"{self.root / MOVIES_FILENAME}: has no movie {row[1]}, which a rating names")
                row = row + movies[row[1]]
            yield self.row_mapper(row) if self.row_mapper else row


def _rows(path: Path, **open_kw: Any) -> ReadLinesFromCSV:
    return ReadLinesFromCSV(LoadFiles((str(path),), mode="r", **open_kw), skip_first_line=True)


def movielens_20m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _named,
    **open_kw: Any,
) -> IterDataPipe:
    """The ratings of MovieLens 20M, one by one.

    Args:
        root: the folder with ``ratings.csv`` and ``movies.csv``.
        include_movies_data: append the movie's title and genres to each rating.
        row_mapper: makes an item of a row's list of text; by default a dictionary with ``DEFAULT_COLUMN_NAMES`` and
            typed values; None leaves the list.
        **open_kw: other arguments of ``open`` for ``ratings.csv``.

    Raises:
        InputError: a rating of a movie that ``movies.csv`` lacks; while it is read.
        OSError: a file cannot be opened; while it is read.
    """
    return _Ratings(root, include_movies_data, row_mapper, open_kw)


def movielens_25m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _named,
    **open_kw: Any,
) -> IterDataPipe:
    """The ratings of MovieLens 25M, one by one: files, arguments and errors as :func:`movielens_20m`."""
    return _Ratings(root, include_movies_data, row_mapper, open_kw)
