"""The batch class, and helpers to read, split and limit streams of rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterDataPipe

from recinfer.errors import ConfigError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.streamable import Pipelineable

__all__ = [
    "PATH_MANAGER_KEY",
    "Batch",
    "Limit",
    "LoadFiles",
    "ReadLinesFromCSV",
    "check_path_manager",
    "safe_cast",
]

PATH_MANAGER_KEY = "torchrec"
"""The only supported ``path_manager_key``, for files that ``open`` opens."""

T = TypeVar("T")


@dataclass
class Batch(Pipelineable):
    """``B`` examples of a click model.

    Attributes:
        dense_features: float ``[B, dense features]``.
        sparse_features: ids of each feature, of ``B`` examples.
        labels: ``[B]``.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on ``device``."""
        return Batch(
            self.dense_features.to(device=device, non_blocking=non_blocking),
            self.sparse_features.to(device=device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        """Keep the memory alive until ``stream`` is done with it."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())


class LoadFiles(IterDataPipe):
    """``(path, open file)`` of each path.

    Args:
        datapipe: the paths.
        mode: mode of ``open``; ``"b"`` and ``"t"`` are ``"rb"`` and ``"rt"``.
        length: the result of ``len``; -1 if unknown.
        path_manager_key: only :data:`PATH_MANAGER_KEY`.
        **open_kw: other arguments of ``open``.

    Raises:
        ConfigError: another path manager, or a mode that does not read.
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        if mode not in ("b", "t", "r", "rb", "rt"):
            raise ConfigError(f"mode is {mode!r}; expected one of b, t, r, rb, rt")
        check_path_manager(path_manager_key)
        self.datapipe = datapipe
        self.length = length
        self.open_kw = open_kw
        self.mode = mode if mode.startswith("r") else f"r{mode}"

    def __iter__(self) -> Iterator[tuple[str, IO[Any]]]:
        for path in self.datapipe:
            yield path, open(path, self.mode, **self.open_kw)  # noqa: SIM115 - whoever reads it closes it

    def __len__(self) -> int:
        if self.length == -1:
            raise NotImplementedError("the number of files is unknown; pass length=")
        return self.length


class ReadLinesFromCSV(IterDataPipe):
    """The rows of files, each a list of text.

    Args:
        datapipe: ``(path, open file)``, as :class:`LoadFiles` gives; a file is closed at its end.
        skip_first_line: leave out the first row of each file.
        **kw: arguments of ``csv.reader``.
    """

    def __init__(self, datapipe: Iterable[tuple[str, IO[Any]]], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.skip_first_line = skip_first_line
        self.kw = kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            with file:
                rows = csv.reader(file, **self.kw)
                if self.skip_first_line:
                    next(rows, None)
                yield from rows


class Limit(IterDataPipe):
    """The first ``limit`` items of a stream."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.limit = limit

    def __iter__(self) -> Iterator[Any]:
        for _, item in zip(range(self.limit), self.datapipe):
            yield item


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """``dest_type(val)``, or ``default`` if that raises ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


def check_path_manager(key: str) -> None:
    """Raise ConfigError unless the path manager is :data:`PATH_MANAGER_KEY`."""
    if key != PATH_MANAGER_KEY:
        raise ConfigError(
            f"path_manager_key is {key!r}: only Python's open is supported; leave it out, and copy or mount remote "
            f"files"
        )
