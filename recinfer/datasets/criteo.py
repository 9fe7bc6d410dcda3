"""Iterates over Criteo click logs: rows of the text files, and batches of binary (npy) files.

The text's 40 fields are named ``label``, ``int_0..int_12`` and ``cat_0..cat_25``, as TorchRec's programs name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from recinfer.datasets.criteo_binary import BinaryCriteoUtils
from recinfer.datasets.utils import (
    PATH_MANAGER_KEY,
    Batch,
    LoadFiles,
    ReadLinesFromCSV,
    check_path_manager,
    safe_cast,
)
from recinfer.errors import ConfigError, InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "CAT_FEATURE_COUNT",
    "COLUMN_TYPE_CASTERS",
    "DAYS",
    "DEFAULT_CAT_NAMES",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_INT_NAMES",
    "DEFAULT_LABEL_NAME",
    "FREQUENCY_THRESHOLD",
    "INT_FEATURE_COUNT",
    "TOTAL_TRAINING_SAMPLES",
    "BinaryCriteoUtils",
    "CriteoIterDataPipe",
    "InMemoryBinaryCriteoIterDataPipe",
    "criteo_kaggle",
    "criteo_terabyte",
]

FREQUENCY_THRESHOLD = 3
INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{i}" for i in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{i}" for i in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES: list[str] = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
TOTAL_TRAINING_SAMPLES = 4_195_197_692
"""Rows of days 0 to 22 of the terabyte set; day 23 is for validation and test."""


def _to_int(text: Any) -> Any:
    return safe_cast(text, int, 0)


COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [_to_int] * (1 + INT_FEATURE_COUNT) + [str] * CAT_FEATURE_COUNT
"""Converts the text of each of ``DEFAULT_COLUMN_NAMES`` to its value; 0 for text that is not a number."""


def _named(row: list[str]) -> dict[str, Any]:
    # A row without a label has 39 fields: names and fields are counted from the end.
    first = len(DEFAULT_COLUMN_NAMES) - len(row)
    if first not in (0, 1):
        raise InputError(f"a row has {len(row)} fields; expected 40, or 39 without the label: {row!r:.80}")
    return {n: cast(text) for n, cast, text in zip(DEFAULT_COLUMN_NAMES[first:], COLUMN_TYPE_CASTERS[first:], row)}


class CriteoIterDataPipe(IterDataPipe):
    """The rows of Criteo's tab-separated files, one by one; the workers of a DataLoader split the files between them.

    Args:
        paths: the files.
        row_mapper: makes an item of a row's list of text; by default a dictionary with ``DEFAULT_COLUMN_NAMES`` and
            typed values (categories stay text); None leaves the list.
        **open_kw: other arguments of ``open``.

    Raises:
        InputError: a row of neither 40 nor 39 fields, with the default ``row_mapper``; while it is read.
        OSError: a file cannot be opened; while it is read.
    """

    def __init__(
        self, paths: Iterable[str], *, row_mapper: Callable[[list[str]], Any] | None = _named, **open_kw: Any
    ) -> None:
        self.paths = paths
        self.row_mapper = row_mapper
        self.open_kw = open_kw

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        paths = [p for at, p in enumerate(self.paths) if worker is None or at % worker.num_workers == worker.id]
        rows = ReadLinesFromCSV(LoadFiles(paths, mode="r", **self.open_kw), delimiter="\t")
        yield from map(self.row_mapper, rows) if self.row_mapper else rows


def criteo_terabyte(
    paths: Iterable[str], *, row_mapper: Callable[[list[str]], Any] | None = _named, **open_kw: Any
) -> IterDataPipe:
    """The rows of the terabyte set's files; arguments and errors as :class:`CriteoIterDataPipe`."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(path: str, *, row_mapper: Callable[[list[str]], Any] | None = _named, **open_kw: Any) -> IterDataPipe:
    """The rows of the Kaggle set's ``train.txt`` or ``test.txt``; arguments and errors as :class:`CriteoIterDataPipe`."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """A rank's batches of binary Criteo files (see :meth:`BinaryCriteoUtils.tsv_to_npys`), which are read into memory
    at the start.

    Global batches go around the ranks: rank ``r`` of ``w`` gets batches ``r``, ``r + w``, ... Rows left over at the end
    are given to all ranks in equal parts (some one more), so that all have as many batches.

    Args:
        stage: ``"train"`` uses all rows; ``"val"`` the first half of the first file, ``"test"`` the second.
        dense_paths, sparse_paths, labels_paths: files of float ``[rows, 13]``, ids ``[rows, 26]``, labels ``[rows, 1]``.
        batch_size: rows of a rank's batch.
        rank, world_size: this rank, and the number of ranks.
        drop_last: leave out the rows left over.
        shuffle_batches: shuffle the rows of each batch.
        shuffle_training_set: for ``"train"``, shuffle all rows first, alike on all ranks, and give each its part.
        shuffle_training_set_random_seed: seed of both ways to shuffle.
        mmap_mode: leave the files on disk and read them as they are used.
        hashes: for each of the 26 features, the modulus of its ids.
        path_manager_key: only :data:`PATH_MANAGER_KEY`.

    Raises:
        ConfigError: another stage or path manager.
        InputError: files that do not fit each other.
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        if stage not in ("train", "val", "test"):
            raise ConfigError(f"stage is {stage!r}; expected one of train, val, test")
        check_path_manager(path_manager_key)
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle_batches = shuffle_batches
        self.mmap_mode = mmap_mode
        self.hashes = None if hashes is None else np.array(hashes).reshape(1, CAT_FEATURE_COUNT)
        # TorchRec seeds numpy's global generator; a separate one gives the same numbers without side effects.
        self._random = np.random.RandomState(shuffle_training_set_random_seed)

        shuffle = shuffle_training_set and stage == "train"
        mode: Literal["r"] | None = "r" if mmap_mode or shuffle else None
        self.dense_arrs, self.sparse_arrs, self.labels_arrs = (
            [np.load(path, mmap_mode=mode) for path in paths] for paths in (dense_paths, sparse_paths, labels_paths)
        )
        self._check_rows(dense_paths)
        if shuffle:
            self._take_shuffled_part()
        elif stage != "train":
            self._take_half(first=stage == "val")
        if self.hashes is not None and not mmap_mode:
            for ids in self.sparse_arrs:
                ids %= self.hashes
        self.num_rows_per_file = [len(part) for part in self.dense_arrs]
        self._starts = self._batch_starts(sum(self.num_rows_per_file), bool(drop_last))

    def __iter__(self) -> Iterator[Batch]:
        for at in range(self.rank, len(self._starts) - 1, self.world_size):
            yield self._batch(*(self._rows(part, at) for part in (self.dense_arrs, self.sparse_arrs, self.labels_arrs)))

    def __len__(self) -> int:
        return (len(self._starts) - 1) // self.world_size

    def _check_rows(self, paths: list[str]) -> None:
        counts = [[len(array) for array in part] for part in (self.dense_arrs, self.sparse_arrs, self.labels_arrs)]
        if not paths or counts[1:] != counts[:-1]:
            raise InputError(
                f"the dense, sparse and labels files have {counts} rows; expected at least one file, and the same "
                f"rows in each"
            )

    def _take_half(self, first: bool) -> None:
        middle = (len(self.dense_arrs[0]) + 1) // 2
        half = slice(None, middle) if first else slice(middle, None)
        for part in (self.dense_arrs, self.sparse_arrs, self.labels_arrs):
            part[0] = part[0][half]

    def _take_shuffled_part(self) -> None:
        rows = [len(array) for array in self.dense_arrs]
        place = self._random.permutation(sum(rows))  # the place of each row in the shuffled set
        bounds = _even_bounds(sum(rows), self.world_size)
        first, end = bounds[self.rank], bounds[self.rank + 1]
        here = np.split(place, np.cumsum(rows)[:-1])

        def take(part: list[NDArray[Any]]) -> list[NDArray[Any]]:
            taken = np.empty((end - first, *part[0].shape[1:]), part[0].dtype)
            for array, places in zip(part, here):
                mine = np.flatnonzero((places >= first) & (places < end))
                taken[places[mine] - first] = array[mine]
            return [taken]

        self.dense_arrs, self.sparse_arrs, self.labels_arrs = map(
            take, (self.dense_arrs, self.sparse_arrs, self.labels_arrs)
        )
        self.rank, self.world_size = 0, 1

    def _batch_starts(self, rows: int, drop_last: bool) -> NDArray[np.int64]:
        """The first row of each global batch, and the end of the last; the number of batches is a multiple of the
        number of ranks."""
        rounds, left = divmod(rows, self.world_size * self.batch_size)
        sizes = [self.batch_size] * (rounds * self.world_size)
        if left and not drop_last:
            if left < self.world_size and rounds:  # too few for all: the last whole batches grow by one row
                del sizes[-self.world_size :]
                left += self.world_size * self.batch_size
            if left >= self.world_size:
                sizes += np.diff(_even_bounds(left, self.world_size)).tolist()
        return np.cumsum([0, *sizes])

    def _rows(self, part: list[NDArray[Any]], batch: int) -> NDArray[Any]:
        """A copy of the rows of a global batch, which may span several files; memory-mapped arrays are read-only."""
        start, end = self._starts[batch], self._starts[batch + 1]
        pieces, before = [], 0
        for array in part:
            pieces.append(array[max(start - before, 0) : max(end - before, 0)])
            before += len(array)
        return np.concatenate(pieces)

    def _batch(self, dense: NDArray[Any], sparse: NDArray[Any], labels: NDArray[Any]) -> Batch:
        if self.mmap_mode and self.hashes is not None:
            sparse %= self.hashes
        if self.shuffle_batches:
            order = self._random.permutation(len(dense))
            dense, sparse, labels = dense[order], sparse[order], labels[order]
        ids = KeyedJaggedTensor(
            keys=DEFAULT_CAT_NAMES,
            values=torch.from_numpy(sparse.T.reshape(-1)),
            lengths=torch.ones(sparse.size, dtype=torch.int32),
            offsets=torch.arange(sparse.size + 1, dtype=torch.int32),
            stride=len(sparse),
        )
        return Batch(torch.from_numpy(dense), ids, torch.from_numpy(labels.reshape(-1)))


def _even_bounds(rows: int, parts: int) -> NDArray[np.int64]:
    """Bounds of ``parts`` parts of ``rows`` rows; if they do not divide evenly, the first parts have one row more."""
    sizes = np.full(parts, rows // parts)
    sizes[: rows % parts] += 1
    return np.cumsum([0, *sizes])
