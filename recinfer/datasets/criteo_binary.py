"""Converts Criteo's text files to binary (npy) files and reads ranges of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.data.criteo import DENSE, LABEL, SPARSE
from recinfer.data.stream import RowStream
from recinfer.datasets.utils import PATH_MANAGER_KEY, check_path_manager
from recinfer.errors import InputError
from recinfer.files import naming

__all__ = ["BinaryCriteoUtils"]

_BLOCK_ROWS = 1 << 14


class BinaryCriteoUtils:
    """Writes and reads binary Criteo files: one each for dense features, sparse features and labels per text file."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        """Write the rows of a text file as three npy files.

        Dense: float32 ``[rows, 13]``, ``log(count - smallest count of the file + 2)``, an empty one being 0. Sparse:
        int64 ``[rows, 26]``, the number that the hex token writes, an empty one being 0. Labels: int32 ``[rows, 1]``,
        -1 where the rows have none.

        Args:
            in_file: the text file, gzip or not, in the form that :class:`recinfer.data.stream.RowStream` reads.
            out_dense_file, out_sparse_file, out_labels_file: are written.
            dataset_name: ``"criteo_1tb"`` or ``"criteo_kaggle"``; both are read alike, with a label or without.
            path_manager_key: only :data:`PATH_MANAGER_KEY`.

        Raises:
            ConfigError: another path manager.
            InputError: rows of another form.
            OSError: a file cannot be read or written.
        """
        check_path_manager(path_manager_key)
        dense, sparse, labels = [], [], []
        for block in RowStream(in_file).blocks(_BLOCK_ROWS):
            dense.append(np.stack([_integers(block[name], 10, in_file) for name in DENSE], axis=1))
            sparse.append(np.stack([_integers(block[name], 16, in_file) for name in SPARSE], axis=1))
            has_label = LABEL in block
            labels.append(_integers(block[LABEL], 10, in_file) if has_label else np.full(len(dense[-1]), -1))
        if not dense:
            raise InputError(f"{in_file}: has no rows")
        counts = np.concatenate(dense)
        _save(out_dense_file, np.log(counts - (counts.min() - 2), dtype=np.float32))
        _save(out_sparse_file, np.concatenate(sparse))
        _save(out_labels_file, np.concatenate(labels).astype(np.int32).reshape(-1, 1))

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """The shape of an npy file, from its header."""
        check_path_manager(path_manager_key)
        return np.load(path, mmap_mode="r").shape

    @staticmethod
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = PATH_MANAGER_KEY,
        mmap_mode: bool = False,
    ) -> NDArray[Any]:
        """Rows ``start_row`` to ``start_row + num_rows`` of an npy file with two dimensions.

        Raises:
            InputError: other dimensions, or rows that the file lacks.
        """
        check_path_manager(path_manager_key)
        array = np.load(fname, mmap_mode="r")
        if array.ndim != 2:
            raise InputError(f"{fname}: has {array.ndim} dimensions; expected 2")
        if not (0 <= start_row < len(array) and start_row + num_rows <= len(array)):
            raise InputError(f"{fname}: has {len(array)} rows; got the range of {num_rows} rows from row {start_row}")
        rows = array[start_row : start_row + num_rows]
        return rows if mmap_mode else np.array(rows)

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = 3,
        columns: int = 26,
        path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Renumber the ids of sparse files as 2, 3, ... in order of first occurrence.

        The files are numbered together, each column by itself. An id that comes fewer than ``frequency_threshold``
        times is 1.

        Args:
            in_files: sparse files, ``[rows, columns]``.
            output_dir: gets a file of the same shape and dtype for each: its name up to the first dot, and the suffix.
            frequency_threshold: see above; 1 keeps every id.
            columns: how many columns are numbered.
            path_manager_key: only :data:`PATH_MANAGER_KEY`.
            output_file_suffix: of the files written.
        """
        check_path_manager(path_manager_key)
        files = [np.load(path) for path in in_files]
        ends = np.cumsum([len(file) for file in files])[:-1]
        for at in range(columns):
            _, first, which, times = np.unique(
                np.concatenate([file[:, at] for file in files]),
                return_index=True,
                return_inverse=True,
                return_counts=True,
            )
            kept = times >= frequency_threshold
            numbers = np.ones(len(first), dtype=np.int64)
            numbers[kept] = 2 + np.argsort(np.argsort(first[kept]))
            for file, part in zip(files, np.split(numbers[which], ends)):
                file[:, at] = part
        for path, file in zip(in_files, files):
            _save(Path(output_dir) / (Path(path).name.partition(".")[0] + output_file_suffix), file)


def _integers(texts: NDArray[Any], base: int, path: str) -> NDArray[np.int64]:
    try:
        return np.fromiter((int(text, base) if text else 0 for text in texts), np.int64, len(texts))
    except ValueError as error:
        raise InputError(f"{path}: {error}; Criteo's counts are whole numbers and its tokens hexadecimal") from error


def _save(path: str | Path, array: NDArray[Any]) -> None:
    with naming(path), open(path, "wb") as file:  # np.save itself would append .npy to a name without it
        np.save(file, array)
